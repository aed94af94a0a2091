"""Which versions are served."""

from __future__ import annotations

import pytest

from npuserve.model_repository.pbtxt import parse_config
from npuserve.model_repository.version_policy import choose_versions


@pytest.mark.parametrize(
    ("policy", "present", "served"),
    [
        ("", [1, 12, 3], [12]),
        ("version_policy { latest { num_versions: 2 } }", [1, 12, 3], [3, 12]),
        ("version_policy { latest { num_versions: 0 } }", [1, 2], [2]),
        ("version_policy { latest { num_versions: 9 } }", [1, 2], [1, 2]),
        ("version_policy { all {} }", [2, 1], [1, 2]),
        ("version_policy { specific { versions: [ 3, 1 ] } }", [1, 2, 3], [1, 3]),
        ("version_policy { specific { versions: [ 1, 7 ] } }", [1, 2], [1]),
        ("version_policy { specific { versions: [ 7 ] } }", [1], []),
        ("", [], []),
    ],
)
def test_policy(policy: str, present: list[int], served: list[int]) -> None:
    """The policy chooses among the versions present; absent ones are no error by themselves."""
    assert choose_versions(parse_config(policy, "config.pbtxt"), present) == served
