"""Poll mode: what changed between two looks at the repositories. Pure.

The whole repository is compared by fingerprints, model by model, so one that cannot be read
(half copied, a broken configuration) holds up no other.

Differs from Triton: a change of `instance_group` alone is no special case. It is a reload like
any other, beside the old version and without a lost request; Triton adds and removes instances of
the running version.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from npuserve.model_repository.layout import Fingerprint


@dataclass(frozen=True)
class Changes:
    """Names in alphabetical order.

    Attributes:
        load: new or modified models.
        unload: models the server knows that are in no repository any more.
    """

    load: tuple[str, ...]
    unload: tuple[str, ...]


def compare(
    before: Mapping[str, Fingerprint],
    after: Mapping[str, Fingerprint],
    known: Collection[str],
    ambiguous: Collection[str],
) -> Changes:
    """The actions that bring the server to where the repositories are.

    Args:
        before, after: fingerprints of the last look and of this one.
        known: models the server has an entry for, whatever their state.
        ambiguous: names that are in several repositories: neither loaded nor unloaded.
    """
    return Changes(
        load=tuple(sorted(name for name, state in after.items() if before.get(name) != state)),
        unload=tuple(sorted(set(known) - after.keys() - set(ambiguous))),
    )
