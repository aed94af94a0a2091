"""What polling makes of two looks at the repositories."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from npuserve.model_repository.layout import Fingerprint
from npuserve.model_repository.watcher import Changes, compare

OLD = Fingerprint({"config.pbtxt": (1, 1)}, {"1/model.py": (1, 1)})
NEW_CONFIG = Fingerprint({"config.pbtxt": (2, 1)}, {"1/model.py": (1, 1)})
NEW_FILE = Fingerprint({"config.pbtxt": (1, 1)}, {"1/model.py": (1, 2)})


def test_new_and_modified_models_are_loaded_and_gone_ones_unloaded() -> None:
    """A change of the configuration and of any file counts; the rest is left alone."""
    before = {"same": OLD, "config": OLD, "file": OLD, "gone": OLD}
    after = {"same": OLD, "config": NEW_CONFIG, "file": NEW_FILE, "added": OLD}
    assert compare(before, after, before.keys(), ()) == Changes(
        load=("added", "config", "file"), unload=("gone",)
    )


def test_a_name_that_became_ambiguous_keeps_what_it_serves() -> None:
    """A second model of the name must not take the first one down."""
    assert compare({"m": OLD}, {}, ["m"], ["m"]) == Changes((), ())


def test_a_model_back_in_its_repository_is_loaded_again() -> None:
    """The look between had it gone."""
    gone = compare({"m": OLD}, {}, ["m"], ())
    assert gone == Changes((), ("m",))
    assert compare({}, {"m": OLD}, ["m"], ()) == Changes(("m",), ())


NAMES = st.sampled_from("abcdef")
LOOKS = st.dictionaries(NAMES, st.sampled_from([OLD, NEW_CONFIG, NEW_FILE]))


@given(LOOKS, LOOKS, st.sets(NAMES))
def test_no_model_is_both_loaded_and_unloaded(
    before: dict[str, Fingerprint], after: dict[str, Fingerprint], known: set[str]
) -> None:
    """And without a change there is nothing to do."""
    changes = compare(before, after, known, ())
    assert not set(changes.load) & set(changes.unload)
    assert compare(after, after, known & after.keys(), ()) == Changes((), ())
