"""README.md and the generated pages of docs/ say what results, options and commands say."""

from tests.support.launch_scripts import load_script


def test_pages_are_up_to_date(monkeypatch):
    monkeypatch.setattr("sys.argv", ["pages.py", "--check"])
    assert not load_script("pages").main()


def test_the_readme_is_short(pytestconfig):
    text = (pytestconfig.rootpath / "README.md").read_text()
    assert len(text.split()) <= 1300
    assert len(text.splitlines()) <= 130
