"""A load generator and a pair programmer as their makers ship them, against `ruvllm serve`: guidellm and aider.

    python3 tests/clients/programs.py http://127.0.0.1:8080 FOLDER

The server has to run with `--api-key secret --temp 0`, a context of 65,536 tokens and a grammar of short texts, as a small
model goes on for ever; FOLDER has a virtual environment for each, `guidellm` and `aider` (requirements-guidellm.txt,
requirements-aider.txt).
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

SERVER = sys.argv[1].rstrip("/")
FOLDER = pathlib.Path(sys.argv[2]).resolve()
KEY = "secret"


def run(program, arguments, folder, **more):
    """What the program writes; its home is the folder, and it asks nobody but the server."""
    environment = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    environment |= {"HOME": str(folder), "NO_COLOR": "1", "HF_HUB_OFFLINE": "1", **more}
    done = subprocess.run(
        [FOLDER / program / "bin" / program, *arguments],
        cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600, check=False,
    )
    said = done.stdout[-3000:] + done.stderr[-3000:]
    assert done.returncode == 0, f"{program} ended with {done.returncode}:\n{said}"
    return done.stdout


def guidellm(folder):
    """Four requests, two at a time: all of them succeed, and their tokens are counted."""
    lines, report = folder / "lines.jsonl", folder / "report.json"
    line = {"prompt": "What is a trait?", "output_tokens_count": 8}
    lines.write_text("".join(json.dumps(line | {"prompt": f"{i}. What is a trait?"}) + "\n" for i in range(4)))
    run(
        "guidellm",
        [
            "run", "--backend", f"kind=openai_http,target={SERVER},model=ruvllm,api_key={KEY}",
            "--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=4",
            "--data", f"kind=json_file,path={lines}", "--output", f"kind=json,path={report}", "--disable-progress",
        ],
        folder, GUIDELLM__MAX_WORKER_PROCESSES="1",
    )
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert len(requests["successful"]) >= 4 and not requests["errored"], requests
    assert all(request["output_tokens"] > 0 for request in requests["successful"]), requests


def aider(folder):
    """A question about a file, streamed and whole: the model's words are printed."""
    (folder / "lib.rs").write_text("pub fn two() -> u8 {\n    2\n}\n")
    arguments = [
        "--model", "openai/ruvllm", "--openai-api-base", f"{SERVER}/v1", "--openai-api-key", KEY, "--no-git", "--yes-always",
        "--no-show-model-warnings", "--no-check-update", "--analytics-disable", "--message", "Say hello.", "lib.rs",
    ]
    for more in ([], ["--no-stream"]):
        said = run("aider", [*arguments, *more], folder)
        assert "sent, " in said and "received." in said, said


for program in (aider, guidellm):
    with tempfile.TemporaryDirectory() as name:
        program(pathlib.Path(name))
    print(f"{program.__name__}: as it should be")
