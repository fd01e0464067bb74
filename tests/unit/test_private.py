"""Credentials reach no file, and a lock no file of somebody else's."""

import pytest

from instep.arguments.parse import parse
from instep.errors import OutputError, RewardError
from instep.system.private import without_credentials
from instep.system.processes import FolderLock

URL = "https://me:s3cret@host:1/reward/a@b?x=1&api_key=s3cret&n=2"


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        (URL, "https://***@host:1/reward/a@b?x=1&api_key=***&n=2"),
        (
            "two: http://s3cret@a/ and 'http://b?access_token=s3cret'",
            "two: http://***@a/ and 'http://b?access_token=***'",
        ),
        ("http://h/?sig=s3cret&q=me@home", "http://h/?sig=***&q=me@home"),
        ("me@home, http://host/a@b, ://", "me@home, http://host/a@b, ://"),
    ],
)
def test_urls_lose_their_credentials(text, clean):
    assert without_credentials(text) == clean


def test_arguments_and_errors_have_none(tmp_path):
    args = parse(["--hf-checkpoint", "x", "--rm-url", URL], "plan")
    assert args.rm_url == URL == args.view({}).rm_url  # what acts, and a hook, get it
    for text in (str(args.to_dict()), repr(args), str(args.view({}).to_dict())):
        assert "s3cret" not in text and "host:1/reward" in text
    error = RewardError(f"{URL} did not answer", where=URL)
    assert "s3cret" not in str(error) + repr(error.args) + error.where and "host:1" in error.what


def test_a_lock_follows_no_link(tmp_path):
    """Another user has planted it in a folder that both may write to."""
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(precious)
    with pytest.raises(OutputError, match="cannot be written"):
        FolderLock(tmp_path / "run", "--run-dir")
    assert precious.read_text() == "kept"
    (tmp_path / "run" / ".lock").unlink()
    lock = FolderLock(tmp_path / "run", "--run-dir")
    assert (tmp_path / "run" / ".lock").stat().st_mode & 0o777 == 0o600
    lock.release()
