"""What doctor says of the settings: of the spool, of the folder of media, and of variables that set nothing."""

import json

from tests.cli.shell import run_warm


def doctor(file, *, status=0, **environment):
    """Its findings by their subject."""
    said = run_warm("doctor", "--json", "--config", file, status=status, **environment)
    return {one["subject"]: one for one in json.loads(said)}


def test_folders_that_will_do(tmp_path):
    spool, file = tmp_path / "new" / "spool", tmp_path / "settings.toml"
    file.write_text(f'spool = "{spool}"\nallowed_media_dir = "{tmp_path}"\n')
    found = doctor(file, MINDIE_MM_MAX_IMAGE="a-value")
    assert (found["spool"]["status"], found["spool"]["found"]) == ("ok", f"{spool} can be made")
    assert not spool.parent.exists()
    assert found["media folder"]["status"] == "ok"
    assert found["settings"]["status"] == "warning"
    assert found["settings"]["found"] == "MINDIE_MM_MAX_IMAGE sets nothing; MINDIE_MM_MAX_IMAGES would"
    spool.mkdir(parents=True, mode=0o700)
    found = doctor(file)
    assert (found["spool"]["status"], found["spool"]["found"]) == ("ok", f"{spool} can be written")
    assert list(spool.iterdir()) == []
    assert "settings" not in found


def test_folders_that_will_not_do(tmp_path):
    file = tmp_path / "settings.toml"
    nothing = tmp_path / "nothing"
    for spool, why in (
        ("/proc/x", "cannot be written: "),
        (file, "is no directory"),
        (file / "x", "cannot be written: Not a directory"),
    ):
        file.write_text(f'spool = "{spool}"\nallowed_media_dir = "{nothing}"\n')
        found = doctor(file, status=1)
        assert found["spool"]["status"] == found["media folder"]["status"] == "error"
        assert str(spool) in found["spool"]["found"]
        assert why in found["spool"]["found"]
        assert found["media folder"]["found"] == f"allowed_media_dir is {nothing}, which is no folder"
