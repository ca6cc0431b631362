"""Where `duoka launch` writes when nobody named a folder."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from duoka.cli.launch import new_folder


def test_starts_within_one_second_have_a_folder_each(tmp_path: Path) -> None:
    """Of a sweep (`duoka launch x.py --lr 1 & duoka launch x.py --lr 2 &`) all but one were refused."""
    wanted = tmp_path / "runs" / "x-20260101-000000"
    with ThreadPoolExecutor(4) as several:
        found = list(several.map(new_folder, [wanted] * 4))
    assert {path.name for path in found} == {wanted.name, *(f"{wanted.name}-{number}" for number in (2, 3, 4))}
    assert all(path.is_dir() for path in found)
