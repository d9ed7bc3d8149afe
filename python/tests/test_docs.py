from snippets import run_snippets


def test_python():
    names = run_snippets("python.md", least=3)
    out, lse = names["out"], names["lse"]
    assert out.shape == (20, 32, 128) and lse.shape == (20, 32)
