/* One file of somebody's taken apart, in a folder in memory: what becomes a pair's text, what is followed
 * through imports and what is not. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "base/marker.h"
#include "import_fixture.h"
#include "rag/import.h"

static const char MODULE[] = MODULE_HEAD KERNEL("shared", "return x_ptr")
    KERNEL("fwd", "return shared(x_ptr) * SCALE") "# about the next one\n" KERNEL(
        "bwd", "return shared(x_ptr) + own(x_ptr)") KERNEL("own", "return x_ptr")
        KERNEL("unused", "pass") "def launch(dy):\n    bwd[(1,)](dy, 1, BLOCK=2)\n\n" CLASS(
            "Good", "fwd[(1,)](x, 1, BLOCK=2)", "return launch(dy)") CLASS("Torch", "return x", "return dy")
            CLASS("NoBackwardKernel", "fwd[(1,)](x, 1, BLOCK=2)",
                  "return dy") "\nif __name__ == \"__main__\":\n    print(Good)\n";

static size_t offset(const char *text, const char *part)
{
    assert_non_null(text);
    const char *at = strstr(text, part);
    if (!at)
        fail_msg("'%s' is not in:\n%s", part, text);
    return (size_t)(at - text);
}

/* A folder in memory: path, text, path, text, NULL. */
static char *read_table(void *arg, const char *path)
{
    for (const char *const *at = arg; *at; at += 2)
        if (strcmp(at[0], path) == 0)
            return ka_strdup(at[1]);
    return NULL;
}

static void heading(void *arg, const struct ka_module *module, struct ka_buf *out)
{
    (void)arg;
    ka_buf_printf(out, "# from %s\n", module->path);
    ka_module_notices(module, out);
}

static void split(const char *const *table, const char *path, struct ka_import_units *units)
{
    struct ka_err err;
    struct ka_follow *follow = ka_follow_new(read_table, (void *)table);
    if (ka_import_split(follow, path, heading, NULL, units, &err))
        fail_msg("%s", err.msg);
    ka_follow_free(follow);
}

static void import__function_with_kernels__is_split_by_who_mentions_whom(void **state)
{
    (void)state;
    const char *const table[] = {"repo/ops.py", MODULE, NULL};
    struct ka_import_units units;
    split(table, "repo/ops.py", &units);
    assert_int_equal(units.count, 3);
    assert_string_equal(units.items[0].name, "Good");
    assert_null(units.items[0].why);
    const char *text = units.items[0].source;
    size_t marker = offset(text, KA_MARKER), scale = offset(text, "SCALE = 2.0");
    assert_true(offset(text, "def shared(") < offset(text, "def fwd("));
    assert_true(offset(text, "def fwd(") < marker && scale < marker);
    assert_null(strstr(text + scale + 1, "SCALE = 2.0"));
    assert_true(offset(text, "def bwd(") > marker && offset(text, "def own(") > marker);
    assert_null(strstr(text + marker, "def shared(")); /* once, where the forward needs it */
    assert_true(offset(text, "def launch(") < offset(text, "class Good("));
    assert_null(strstr(text, "unused"));
    assert_null(strstr(text, "Text of the module"));
    assert_null(strstr(text, "__main__"));
    assert_null(strstr(text, "class Torch"));
    assert_non_null(strstr(units.items[1].why, "forward launches no Triton kernel"));
    assert_non_null(strstr(units.items[2].why, "backward launches no Triton kernel"));
    ka_import_free(&units);
}

static void import__file_without_functions__gives_no_unit(void **state)
{
    (void)state;
    const char *const table[] = {"a.py", MODULE_HEAD KERNEL("k", "pass"), "b.py", "class (:\n\t\"\"\"", NULL};
    struct ka_import_units units;
    split(table, "a.py", &units);
    assert_int_equal(units.count, 0);
    assert_int_equal(units.kernel_line, 9);
    ka_import_free(&units);
    split(table, "b.py", &units);
    assert_true(units.count == 0 && !units.kernel_line);
    ka_import_free(&units);
}

static void import__function_in_a_condition__is_named_with_its_line(void **state)
{
    (void)state;
    const char *const table[] = {
        "a.py", "import torch\nif torch:\n    class A(torch.autograd.Function):\n        pass\n", NULL};
    struct ka_import_units units;
    split(table, "a.py", &units);
    assert_int_equal(units.count, 1);
    assert_int_equal(units.items[0].line, 3);
    assert_non_null(strstr(units.items[0].why, "not at the top level"));
    ka_import_free(&units);
}

static void import__forward_in_another_file__is_followed(void **state)
{
    (void)state;
    static const char *const ways[] = {
        OPS_FILE("from .fwd import run", "run(x)"),
        OPS_FILE("from .fwd import (run as go, other)", "go(x)"),
        OPS_FILE("from pkg.ops.fwd import run", "run(x)"),
        OPS_FILE("from ..ops import fwd as f", "f.run(x)"),
        OPS_FILE("from . import fwd", "fwd.run(x)"),
        OPS_FILE("import pkg.ops.fwd", "pkg.ops.fwd.run(x)"),
        OPS_FILE("import fwd as there", "there.run(x)"),
        OPS_FILE("from pkg.ops import run", "run(x)"),
        OPS_FILE("from .fwd import *", "run(x)"),
        OPS_FILE("try:\n    from .fwd import run\nexcept ImportError:\n    run = None", "run(x)")};
    for (size_t i = 0; i < KA_COUNT(ways); i++) {
        const char *const table[] = {"repo/pkg/ops/__init__.py",
                                     "from .fwd import run\n",
                                     "repo/pkg/ops/fwd.py",
                                     FWD_FILE,
                                     "repo/pkg/ops/tools.py",
                                     TOOLS_FILE,
                                     "repo/pkg/ops/op.py",
                                     ways[i],
                                     NULL};
        struct ka_import_units units;
        split(table, "repo/pkg/ops/op.py", &units);
        if (units.count != 1 || units.items[0].why)
            fail_msg("way %zu: %s", i, units.count ? units.items[0].why : "no unit");
        const char *text = units.items[0].source;
        size_t marker = offset(text, KA_MARKER);
        assert_true(offset(text, "# from repo/pkg/ops/fwd.py\n# Copyright (c) 2024 Some Body") < marker);
        assert_true(offset(text, "def run(") < marker && offset(text, "def scale(") < marker);
        assert_true(offset(text, "WIDTH = 7") < marker && offset(text, "def bwd(") > marker);
        assert_null(strstr(text, "SPARE"));
        assert_int_equal(units.items[0].file_count, 3);
        assert_string_equal(units.items[0].files[0], "repo/pkg/ops/op.py");
        ka_import_free(&units);
    }
}

static void import__names_of_another_file__are_told(void **state)
{
    (void)state;
    const char *const table[] = {
        "repo/fwd.py",
        "import torch\nimport triton.language as tl\nfrom .tools import scale as by, spare as "
        "unused\n" KERNEL("fwd", "return by(tl.abs(x_ptr))") "def run(x):\n    fwd[(1,)](x)\n",
        "repo/tools.py",
        TOOLS_FILE,
        "repo/op.py",
        OPS_FILE("from .fwd import run as go", "go(x)"),
        NULL};
    struct ka_import_units units;
    split(table, "repo/op.py", &units);
    const char *text = units.items[0].source;
    offset(text, "# from repo/fwd.py\n# tl is triton.language\n# by is scale of .tools\n\n@triton.jit");
    assert_null(strstr(text, "unused"));
    assert_null(strstr(text, "# go is")); /* its import stands there */
    ka_import_free(&units);
}

#define NAMES_OF_NO_ONE                                                                                      \
    "a + b + c + d + e + g + h + i + j + k + l + m + n + o + p + q + r + s + t + u + v + w"

static void import__more_names_than_can_be_followed__is_told(void **state)
{
    (void)state;
    KA_AUTO_BUF struct ka_buf many = {0};
    for (int i = 0; i < 1000; i++)
        ka_buf_printf(&many, "f%d = %d\n", i, i);
    for (int i = 0; i < 4; i++)
        ka_buf_printf(&many, "from .a%d import *\n", i);
    ka_buf_puts(&many, OPS_FILE("", "return " NAMES_OF_NO_ONE));
    const char *const table[] = {"a/op.py", ka_buf_str(&many), "a/a0.py", ka_buf_str(&many),
                                 "a/a1.py", ka_buf_str(&many), "a/a2.py", ka_buf_str(&many),
                                 "a/a3.py", ka_buf_str(&many), NULL};
    struct ka_import_units units;
    split(table, "a/op.py", &units);
    assert_int_equal(units.count, 1);
    assert_non_null(units.items[0].why);
    assert_non_null(strstr(units.items[0].why, "more"));
    ka_import_free(&units);
}

static void import__what_lies_elsewhere__is_not_followed(void **state)
{
    (void)state;
    static const char *const ways[] = {
        OPS_FILE("from ....fwd import run", "run(x)"), OPS_FILE("from triton.fwd import run", "run(x)"),
        OPS_FILE("from .fwd import other", "run(x)"), OPS_FILE("from .circle import run", "run(x)"),
        OPS_FILE("from .fwd import run", "x.run(x)")};
    for (size_t i = 0; i < KA_COUNT(ways); i++) {
        const char *const table[] = {"fwd.py",
                                     FWD_FILE,
                                     "triton/fwd.py",
                                     FWD_FILE,
                                     "repo/fwd.py",
                                     FWD_FILE,
                                     "repo/tools.py",
                                     TOOLS_FILE,
                                     "repo/circle.py",
                                     "from .circle2 import *\nfrom .circle2 import run\n",
                                     "repo/circle2.py",
                                     "from .circle import *\nfrom .circle import run\n",
                                     "repo/op.py",
                                     ways[i],
                                     NULL};
        struct ka_import_units units;
        split(table, "repo/op.py", &units);
        assert_int_equal(units.count, 1);
        if (!units.items[0].why)
            fail_msg("way %zu was followed", i);
        ka_import_free(&units);
    }
}

static void import__notices__are_the_head_of_the_file(void **state)
{
    (void)state;
    static const struct {
        const char *text, *notices;
    } cases[] = {
        {"#!/usr/bin/python\n# -*- coding: utf-8 -*-\n# Copyright A\n\n# SPDX-License-Identifier: MIT\n"
         "x = 1\n# no\n",
         "# Copyright A\n# SPDX-License-Identifier: MIT\n"},
        {"\"\"\"Text.\n\n  Licensed to you.\n\"\"\"\n# more\nx = 1\n",
         "# Text.\n#\n#   Licensed to you.\n# more\n"},
        {"'''Only about the math.'''\nx = 1\n", ""},
        {"# a\n# ---- backward ----\n# b", "# a\n# b\n"},
        {"", ""},
    };
    for (size_t i = 0; i < KA_COUNT(cases); i++) {
        struct ka_module module;
        KA_AUTO_BUF struct ka_buf out = {0};
        assert_int_equal(ka_module_parse("a.py", cases[i].text, &module, NULL), 0);
        ka_module_notices(&module, &out);
        assert_string_equal(ka_buf_str(&out), cases[i].notices);
        ka_module_free(&module);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(import__function_with_kernels__is_split_by_who_mentions_whom),
        cmocka_unit_test(import__file_without_functions__gives_no_unit),
        cmocka_unit_test(import__function_in_a_condition__is_named_with_its_line),
        cmocka_unit_test(import__forward_in_another_file__is_followed),
        cmocka_unit_test(import__names_of_another_file__are_told),
        cmocka_unit_test(import__more_names_than_can_be_followed__is_told),
        cmocka_unit_test(import__what_lies_elsewhere__is_not_followed),
        cmocka_unit_test(import__notices__are_the_head_of_the_file),
    };
    return cmocka_run_group_tests_name("follow", tests, NULL, NULL);
}
