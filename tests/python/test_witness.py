"""The record of torch's operations that another process keeps: nothing that runs beside it changes it."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
from kernel_agent import errors, witness
from kernel_agent.operations import candidate

ENGINE = candidate.engine_may(["aten::mul"])


def phases(work):
    def marked():
        witness.mark("0 forward")
        x = torch.ones(4, requires_grad=True)
        y = (x * 2).sum()
        witness.mark(None)
        torch.exp(x)
        witness.mark("0 backward")
        torch.autograd.grad(y, x)
        work()
        witness.mark(None)
        return {"answer": os.getpid()}

    result, record = witness.apart(marked)
    assert result["answer"] != os.getpid() and record.whole
    return record


def test_record__says_what_each_phase_did_and_nothing_of_the_judge():
    record = phases(lambda: None)
    assert set(record.operations("0 forward")) == {"aten::ones", "aten::mul", "aten::sum"}
    assert "aten::mul" not in record.operations("0 backward", ENGINE)
    assert "aten::mul" in record.operations("0 backward"), (
        "of the engine, where the stub has no such operation"
    )
    assert record.operations("1 backward") is None


def test_record__operation_below_a_composite_one__counts():
    made = phases(lambda: torch.ones(3, 3).matmul(torch.ones(3, 3)).type_as(torch.ones(1)))
    found = made.operations("0 backward", ENGINE)
    assert "aten::mm" in found and "aten::matmul" not in found and "aten::type_as" not in found


def test_record__integers__do_not_count_but_a_float_that_is_read_does():
    found = phases(lambda: (torch.arange(4) * 2, torch.tensor(2.0).item()))
    assert found.operations("0 backward", ENGINE).get("aten::_local_scalar_dense") == 1
    assert "aten::mul" not in found.operations("0 backward", ENGINE)


def names(record):
    return {node.name for node in record.nodes.values()}


def test_record__between_phases__is_not_written():
    record = phases(lambda: None)
    assert "aten::mul" in names(record) and "aten::exp" not in names(record)
    assert witness.apart(lambda: {"nothing": torch.ones(2).exp().tolist()})[1].whole


def test_operation_of_a_thread__that_ends_after_its_phase__counts():
    begun, over, x = threading.Event(), threading.Event(), torch.ones(2)
    library = torch.library.Library("witnessed", "DEF")
    library.define("held(Tensor x) -> Tensor")

    def held(x):
        begun.set()
        over.wait()
        return x

    library.impl("held", held, "CPU")

    def marked():
        witness.mark("0 backward")
        thread = threading.Thread(target=torch.ops.witnessed.held, args=(x,))
        thread.start()
        begun.wait()
        witness.mark(None)
        over.set()
        thread.join()
        return {}

    _, record = witness.apart(marked)
    assert record.operations("0 backward") == {"witnessed::held": 1}


HEAD = '"id": {}, "name": "nothing", "ctrl_deps": 1,\n"attrs": []\n'
OTHERS = "".join(map(HEAD.format, range(60, 90)))


@pytest.mark.parametrize(
    "name",
    [
        f'x", "ctrl_deps": 1,\n{OTHERS}"',
        "x\n" + HEAD.format(10**9),
        'x", "ctrl_deps": 1,\n"finish_ts": 1\n"inputs": "',
    ],
)
def test_record__in_which_a_name_has_lines_of_its_own__knows_nothing(name):
    def work():
        torch.ones(3, 3).mm(torch.ones(3, 3))
        with torch.profiler.record_function(name):
            pass

    assert phases(work).operations("0 backward", ENGINE) is None


def test_record__that_does_not_reach_its_end__knows_nothing():
    record = witness.Record("nonce")
    record.feed(b'"id": 1, "name": "nonce 0 forward", "ctrl_deps": 1,\n')
    assert record.operations("0 forward") is None
    record.feed(b'"finish_ts": 12\n')
    assert record.operations("0 forward") == {}


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (lambda: os._exit(0), "ended with code 0"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "signal 9"),
        (lambda: float("nan"), "without a result"),
    ],
)
def test_process__that_ends_without_an_answer__is_the_candidates_failure(work, said):
    with pytest.raises(errors.Unusable) as caught:
        witness.apart(lambda: {"value": work()})
    assert caught.value.kind == "candidate_raised" and said in caught.value.message


# What the record must show all the same: the judge's own counters, found through a frame and emptied.
CLEARED = """        d_x = d_x + d_y * 2
        frame = Walk.frame()
        while frame is not None:
            case = frame.f_locals.get("self")
            if frame.f_code.co_name == "run" and case is not None:
                case.poison.counts["backward"].clear()
            frame = frame.f_back
        return d_x"""


def test_candidate__that_empties_the_judges_counters__is_held_against_the_record(run_op, write):
    from sources import SCALE_PAIR

    text = SCALE_PAIR.replace("        return d_x", CLEARED, 1)
    text += "\n\nclass Walk:\n    @staticmethod\n    def frame():\n"
    text += "        import sys\n        return sys._getframe()\n"
    case = {"id": 0, "dims": {"N": 24}, "seed": 1, "upstream": {"kind": "normal", "seed": 2}}
    result = run_op("candidate", write(text), cases=[case]).result
    assert {"aten::mul", "aten::add"} <= result["cases"][0]["torch_ops_backward"].keys(), result
