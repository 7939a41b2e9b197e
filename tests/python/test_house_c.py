"""What breaks the order of the C program is found. `make lint` looks at the program itself."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from house_c import problems

GOOD = {
    "base/base.h": "/* uv_run() is not called here */\nint ka_base_add(int a, int b);\n",
    "base/base.c": '#include "base.h"\n\nint ka_base_add(int a, int b)\n{\n    return a + b;\n}\n',
    "agent/io/loop.h": "struct ka_loop;\nvoid ka_loop_run(struct ka_loop *loop);\n",
    "agent/io/loop.c": '#include "loop.h"\n\n#include <uv.h>\n\n'
    "void ka_loop_run(struct ka_loop *loop)\n{\n    uv_run(0, 0);\n}\n",
    "agent/run/run.h": "void ka_run_begin(void);\nvoid ka_run_end(void);\n",
    "agent/run/run.c": '#include "run.h"\n\n#include "agent/io/loop.h"\n\n#include "run_internal.h"\n\n'
    "void ka_run_begin(void)\n{\n    ka_run_step();\n}\n",
    "agent/run/run_internal.h": '#include "run.h"\nvoid ka_run_step(void);\n',
    "agent/run/run_step.c": '#include "run_internal.h"\n\nvoid ka_run_step(void)\n{\n}\n',
    "agent/run/end.c": '#include "run.h"\n\nvoid ka_run_end(void)\n{\n}\n',  # of the folder's own header
    "sandbox/jail/jail.h": "int ka_jail_enter(void);\n",
    "sandbox/jail/enter.c": '#include "jail.h"\n\nint ka_jail_enter(void)\n{\n    return 0;\n}\n',
}


def tree(folder: Path, changed: dict[str, str]) -> Path:
    for name, text in {**GOOD, **changed}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_a_program_in_order_has_no_problems(tmp_path: Path) -> None:
    assert problems(tree(tmp_path, {})) == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        pytest.param(
            {"base/text.c": '#include "agent/io/loop.h"\n'},
            "base/text.c:1: agent/io comes after base",
            id="a folder above",
        ),
        pytest.param(
            {"agent/run/other.c": '\n#include "sandbox/jail/jail.h"\n'},
            "agent/run/other.c:2: sandbox/jail and the rest",
            id="the jail",
        ),
        pytest.param(
            {"agent/io/child.c": '#include "base.h"\n'},
            "agent/io/child.c:1: there is no agent/io/base.h",
            id="another folder by its bare name",
        ),
        pytest.param(
            {"agent/io/child.c": '#include "agent/io/loop.h"\n'},
            "agent/io/child.c:1: a header of the same folder is named loop.h alone",
            id="the same folder by its path",
        ),
        pytest.param(
            {"agent/run/other.c": '#include "run_internal.h"\n'},
            "agent/run/run_internal.h belongs to the files run*.c",
            id="a private header by its neighbour",
        ),
        pytest.param(
            {
                "agent/io/child.h": '#include "kind.h"\n',
                "agent/io/kind.c": '#include "child.h"\n',
                "agent/io/kind.h": "",
            },
            "a circle of includes: agent/io/child -> agent/io/kind -> agent/io/child",
            id="a circle by way of a body",
        ),
        pytest.param(
            {
                "agent/io/child.h": "int ka_child_add(void);\n",
                "agent/io/kind.c": "int ka_child_add(void)\n{\n}\n",
            },
            "agent/io/kind.c:1: ka_child_add is declared in agent/io/child.h",
            id="offered in another's header",
        ),
        pytest.param(
            {"agent/io/kind.c": "int ka_kind_add(void)\n{\n}\n"},
            "agent/io/kind.c:1: ka_kind_add is declared in no header",
            id="offered in no header",
        ),
        pytest.param({"agent/io/base.h": ""}, "base/base.h has the same name", id="two files of one name"),
        pytest.param(
            {"agent/run/other.c": "#include <uv.h>\n"},
            "agent/run/other.c:1: #include <uv.h>",
            id="libuv's header",
        ),
        pytest.param(
            {"agent/run/other.c": 'const char *said = "uv_run";\n/* uv_run\n */ int at = uv_run(0, 0);\n'},
            "agent/run/other.c:3: uv_run",
            id="libuv in code, not in texts",
        ),
        pytest.param({"agent/run/other.c": "static CURL *easy;\n"}, "agent/run/other.c:1: CURL", id="curl"),
    ],
)
def test_what_breaks_the_order_is_found(tmp_path: Path, changed: dict[str, str], words: str) -> None:
    found = problems(tree(tmp_path, changed))
    assert any(words in problem for problem in found), found
