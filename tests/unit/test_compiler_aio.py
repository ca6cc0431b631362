"""Whether DeepSpeed's reader and writer of a disk could be compiled here: asked by compiling, with torch's compiler."""

from duoka.plan.compiler import has_aio


def test_a_compiler_that_is_not_there_or_finds_no_library_means_no(tmp_path):
    asked = tmp_path / "asked"
    fake = tmp_path / "c++"
    fake.write_text(f'#!/bin/sh\necho "$@" > {asked}\ncat >> {asked}\nexit $ANSWER\n', encoding="utf-8")
    fake.chmod(0o755)
    assert not has_aio({"CXX": str(tmp_path / "none")})
    for answer, found in (("0", True), ("1", False)):
        fake.write_text(fake.read_text(encoding="utf-8").replace("$ANSWER", answer), encoding="utf-8")
        assert has_aio({"CXX": str(fake), "LDFLAGS": "-L/opt/aio"}) is found
        fake.write_text(fake.read_text(encoding="utf-8").replace(f"exit {answer}", "exit $ANSWER"), encoding="utf-8")
    said = asked.read_text(encoding="utf-8")
    assert "-laio" in said and "-L/opt/aio" in said and "libaio.h" in said
