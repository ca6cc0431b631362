"""A user who moved a result or a checkpoint to another disk, and left a link in its place."""

from collections.abc import Callable
from pathlib import Path

import pytest

from duoka.model.result import put_in_place
from duoka.store.retention import Keep, make_way, remove_old


def as_checkpoint(draft: Path, final: Path) -> None:
    with make_way(final):
        draft.rename(final)


@pytest.mark.parametrize("put", [put_in_place, as_checkpoint])
@pytest.mark.parametrize("is_mounted", [True, False])
def test_a_result_that_is_a_link_makes_way_as_often_as_there_is_a_new_one(
    tmp_path: Path, is_mounted: bool, put: Callable[[Path, Path], None]
) -> None:
    """At the end of training it was no folder, and the new result was lost."""
    final, elsewhere = tmp_path / "final", tmp_path / "disk"
    if is_mounted:
        elsewhere.mkdir()
        (elsewhere / "model").write_text("old", encoding="utf-8")
    final.symlink_to(elsewhere)
    for text in ("new", "newer"):
        draft = tmp_path / "draft"
        draft.mkdir()
        (draft / "model").write_text(text, encoding="utf-8")
        put(draft, final)
        assert not final.is_symlink() and (final / "model").read_text(encoding="utf-8") == text
        assert sorted(path.name for path in tmp_path.iterdir()) == ["disk"] * is_mounted + ["final"]
    assert not is_mounted or (elsewhere / "model").read_text(encoding="utf-8") == "old"


def test_of_a_checkpoint_that_is_a_link_no_link_stays(tmp_path: Path) -> None:
    for step in (2, 4):
        (tmp_path / f"step-{step:08d}").mkdir()
    (tmp_path / "disk").mkdir()
    (tmp_path / "step-00000001").symlink_to(tmp_path / "disk")
    remove_old(tmp_path, Keep(last=2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "step-00000002", "step-00000004"]
