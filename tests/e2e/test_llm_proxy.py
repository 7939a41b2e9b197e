"""LiteLLM's proxy between the program and a scripted endpoint: `make llm-proxy` installs it and runs this."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import Agent, Endpoint
from files import BACKWARD, FORWARD

LITELLM = Path(
    os.environ.get("KA_LITELLM", Path(__file__).parents[2] / "build" / "llm-proxy" / "bin" / "litellm")
)
KEY = "sk-of-the-proxy"
STARTS_IN = 120  # seconds: it imports for a while

pytestmark = pytest.mark.skipif(not LITELLM.exists(), reason="LiteLLM is not installed: make llm-proxy")

CONFIG = """
model_list:
  - model_name: through
    litellm_params: {{model: openai/scripted, api_base: "{url}", api_key: none}}
general_settings: {{master_key: {key}}}
litellm_settings: {{num_retries: 0}}
"""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Callable[[Endpoint], str]]:
    """proxy(endpoint) starts LiteLLM before it; returns the base URL."""
    started: list[subprocess.Popen[bytes]] = []

    def start(behind: Endpoint) -> str:
        config, port = tmp_path / "litellm.yaml", free_port()
        config.write_text(CONFIG.format(url=behind.url, key=KEY))
        command = [LITELLM, "--config", config, "--host", "127.0.0.1", "--port", str(port)]
        environment = os.environ | {"LITELLM_TELEMETRY": "False", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        with (tmp_path / "litellm.log").open("wb") as log:
            process = subprocess.Popen(
                [*map(str, command)], stdout=log, stderr=log, env=environment, cwd=tmp_path
            )
        started.append(process)
        until = time.monotonic() + STARTS_IN
        while time.monotonic() < until and process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health/liveliness", timeout=2)
            except OSError:
                time.sleep(0.2)
            else:
                return f"http://127.0.0.1:{port}/v1"
        pytest.fail((tmp_path / "litellm.log").read_text()[-2000:])

    yield start
    for process in started:
        process.terminate()
        process.wait()


def test_proxy__streams_usage_and_wrong_keys_and_models__come_through(
    agent: Agent, endpoint: Callable[..., Endpoint], proxy: Callable[[Endpoint], str], tmp_path: Path
) -> None:
    behind = endpoint(
        [
            {
                "text": f"Here it is.\n```python\n{BACKWARD}```\n",
                "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
            }
        ]
    )
    url = proxy(behind)
    (tmp_path / "forward.py").write_text(FORWARD)
    (tmp_path / "key").write_text(KEY)
    asking = ["--file-path", "forward.py", "--base-url", url, "--draft", "llm", "--no-optimise", "--json"]
    with_key = ["--api-key-file", tmp_path / "key"]

    listed = agent("doctor", "--json", "--base-url", url, *with_key, "--model", "through").result[
        "endpoints"
    ][0]
    assert listed["models"] == ["through"] and listed["has_model"]

    (tmp_path / "wrong").write_text("sk-none-of-its")
    wrong_key = agent(*asking, "--api-key-file", tmp_path / "wrong", "--model", "through")
    # Without a database it does not say 401 of a key that it does not know.
    assert wrong_key.code == 5 and "HTTP 400: No connected db" in wrong_key.out, wrong_key.out

    wrong_model = agent(*asking, *with_key, "--model", "unknown")
    assert wrong_model.code == 5 and "HTTP 400" in wrong_model.out, wrong_model.out

    done = agent(*asking, *with_key, "--model", "through")
    assert done.code == 0, done.err
    assert (done.result["llm"]["tokens_in"], done.result["llm"]["tokens_out"]) == (7, 3)
    assert done.result["verdict"] == "verified"

    behind.stop()
    gone = agent(*asking, *with_key, "--model", "through", "--llm-timeout", "8")
    assert gone.code == 5 and "HTTP 5" in gone.out, gone.out
