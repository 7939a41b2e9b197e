"""docs/openapi.json has the routes, the states and the members that the service has, and no other."""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DOC: dict[str, Any] = json.loads((ROOT / "docs" / "openapi.json").read_text())
SERVE = ROOT / "agent" / "serve"


def test_openapi_has_each_route_and_no_other() -> None:
    rows = re.findall(r'^ {4}\{"([A-Z]+)", "([^"]+)", \w+\},$', (SERVE / "api.c").read_text(), re.MULTILINE)
    methods = {"get", "post", "delete"}
    listed = {
        (method.upper(), path.replace("{id}", "*"))
        for path, entry in DOC["paths"].items()
        for method in entry
        if method in methods
    }
    assert len(rows) > 8 and listed == set(rows)


def test_openapi_has_each_member_of_a_run_and_no_other() -> None:
    text = (SERVE / "entry.c").read_text()
    written = text.split("json_t *ka_entry_json(")[1].split("\n}\n")[0]
    members = set(re.findall(r'"([a-z_]{2,})"', written)) - {"queued"}
    assert set(DOC["components"]["schemas"]["Run"]["properties"]) == members


def test_openapi_has_each_member_of_a_submission_and_no_other() -> None:
    text = (ROOT / "agent" / "core" / "submission.c").read_text()
    read = text.split("static int read_member(")[1].split("\n}\n")[0]
    members = set(re.findall(r'strcmp\(name, "(\w+)"\)', read))
    assert set(DOC["components"]["schemas"]["Submission"]["properties"]) == members


def test_openapi_has_each_state_and_no_other() -> None:
    states = (SERVE / "entry.c").read_text().split("states[KA_ENTRY_STATES] = {")[1].split("}")[0]
    assert DOC["components"]["schemas"]["State"]["enum"] == re.findall(r'"(\w+)"', states)


def test_openapi_has_what_is_told_of_the_machine_and_of_a_pair_and_no_more() -> None:
    about = (SERVE / "about.c").read_text().split("json_t *ka_about_fixed(")[1]
    inner = {"path", "versions", "cpu", "cuda"}  # of "python"; of "device"
    members = set(re.findall(r'"([a-z_]{3,})"', about)) - inner
    assert set(DOC["components"]["schemas"]["Machine"]["properties"]) == members
    slots = (SERVE / "about.c").read_text().split("json_t *slots(")[1].split("ka_about_fixed")[0]
    schema = DOC["components"]["schemas"]["Machine"]["properties"]["slots"]["items"]
    assert set(schema["properties"]) == set(re.findall(r'"([a-z_]{3,})"', slots))
    similar = (SERVE / "similar.c").read_text().split("static int add_named(")[1].split("ka_pair_free")[0]
    members = set(re.findall(r'"([a-z_]{2,})"', similar))
    assert set(DOC["components"]["schemas"]["Hit"]["properties"]) == members


def test_openapi_has_each_argument_and_no_other() -> None:
    text = (SERVE / "api.c").read_text()
    names = set(re.findall(r'ka_call_argument\(call, "([a-z-]+)"\)', text))
    names |= set(re.findall(r'"(\w+)"', text.split("names[] = {")[1].split("}")[0]))
    listed = {
        entry["name"]
        for path in DOC["paths"].values()
        for operation in path.values()
        if isinstance(operation, dict)
        for entry in operation.get("parameters", [])
        if entry["in"] == "query"
    }
    assert listed == names
