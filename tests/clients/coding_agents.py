"""Coding agents as their vendors ship them, against `ruvllm serve`: codex, claude and opencode.

    python3 tests/clients/coding_agents.py http://127.0.0.1:8080 FOLDER

The server has to run with `--api-key secret --temp 0`, a context of 65,536 tokens and a grammar of short texts, as a small
model goes on for ever; FOLDER is where `npm ci` put the programs of package.json. Each has a home of its own, asks nobody but the server, and does two things:

- it is asked a question, with all the tools that it offers, and ends with whatever the model says;
- a proxy makes the model call the agent's shell with one harmless command (a small model would not by itself: the proxy
  offers that tool alone, its arguments fixed by the schema, and requires a call), the agent runs it, sends back what the
  command wrote, and ends with the model's next answer.
"""

import http.client
import http.server
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import urllib.parse

SERVER = urllib.parse.urlsplit(sys.argv[1])
PROGRAMS = pathlib.Path(sys.argv[2]).resolve() / "node_modules" / ".bin"
KEY = "secret"
# What the command writes is nowhere in the request that makes the model call it.
COMMAND, WRITTEN = "echo round-$((40 + 2))-trip", "round-42-trip"
SHELLS = {"exec_command": {"cmd": COMMAND}, "Bash": {"command": COMMAND}, "bash": {"command": COMMAND}}
MAX_TOKENS = {"/v1/responses": "max_output_tokens", "/v1/messages": "max_tokens", "/v1/chat/completions": "max_tokens"}
REQUIRED = {"/v1/messages": {"type": "any", "disable_parallel_tool_use": True}}


class Proxy(http.server.ThreadingHTTPServer):
    """Hands on every request, answers kept short; makes the model call the shell first, if `forces`."""

    daemon_threads = True

    def __init__(self, forces):
        super().__init__(("127.0.0.1", 0), Handler)
        self.forces, self.asked, self.came_back, self.failures = forces, 0, False, []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def change(self, path, request):
        """What the server is asked instead."""
        field = MAX_TOKENS.get(path)
        if field is None:
            return
        self.asked += 1
        request[field] = 400
        if not self.forces:
            return
        if WRITTEN in json.dumps(request.get("input") or request["messages"]):
            self.came_back = True
            request["tool_choice"] = {"type": "none"} if path == "/v1/messages" else "none"
            return
        for tool in request.get("tools", []):
            function = tool.get("function", tool)
            if function.get("name") in SHELLS:
                arguments = SHELLS[function["name"]] | ({"description": "A test"} if path != "/v1/responses" else {})
                schema = {
                    "type": "object",
                    "properties": {name: {"type": "string", "enum": [value]} for name, value in arguments.items()},
                    "required": list(arguments),
                    "additionalProperties": False,
                }
                function["input_schema" if path == "/v1/messages" else "parameters"] = schema
                request["tools"] = [tool]
                request["tool_choice"] = REQUIRED.get(path, "required")
                if path != "/v1/messages":
                    request["parallel_tool_calls"] = False


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def hand_on(self):
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if body:
            request = json.loads(body)
            self.server.change(urllib.parse.urlsplit(self.path).path, request)
            body = json.dumps(request).encode()
        server = http.client.HTTPConnection(SERVER.hostname, SERVER.port)
        left_out = ("host", "content-length", "connection", "accept-encoding", "transfer-encoding")
        headers = {name: value for name, value in self.headers.items() if name.lower() not in left_out}
        server.request(self.command, self.path, body, headers)
        response = server.getresponse()
        self.send_response(response.status)
        for name, value in response.getheaders():
            if name.lower() not in ("connection", "content-length", "transfer-encoding", "date", "server"):
                self.send_header(name, value)
        self.send_header("connection", "close")
        self.end_headers()
        answer = b""
        while piece := response.read1(65536):
            answer += piece
            self.wfile.write(piece)
            self.wfile.flush()
        if response.status >= 400 and self.command == "POST":
            self.server.failures.append((self.path, response.status, answer[:500]))
        self.close_connection = True

    do_GET = do_POST = hand_on

    def log_message(self, *_):
        pass


CODEX = """
model = "ruvllm"
model_provider = "ruvllm"
approval_policy = "never"
sandbox_mode = "danger-full-access"
[model_providers.ruvllm]
name = "ruvllm"
base_url = "URL/v1"
wire_api = "responses"
env_key = "RUVLLM_KEY"
[analytics]
enabled = false
"""


def codex(home, url):
    (home / "config.toml").write_text(CODEX.replace("URL", url))
    return ["codex", "exec", "--skip-git-repo-check"], {"CODEX_HOME": str(home), "RUVLLM_KEY": KEY}


def claude(home, url):
    quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_TELEMETRY": "1", "DISABLE_AUTOUPDATER": "1"}
    models = ["--model", "ruvllm", "--allowedTools", "Bash", "-p"]
    return ["claude", *models], quiet | {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": KEY}


def opencode(home, url):
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "ruvllm",
        "options": {"baseURL": f"{url}/v1", "apiKey": KEY},
        "models": {"ruvllm": {"name": "ruvllm", "limit": {"context": 65536, "output": 1024}}},
    }
    config = {"provider": {"ruvllm": provider}, "autoupdate": False, "share": "disabled", "permission": {"bash": "allow"}}
    path = home / "opencode.json"
    path.write_text(json.dumps(config))
    return ["opencode", "run", "--model", "ruvllm/ruvllm"], {"OPENCODE_CONFIG": str(path)}


def run(agent, forces):
    """Asks the agent a question; the proxy that it asked through."""
    proxy = Proxy(forces)
    with tempfile.TemporaryDirectory() as folder:
        home = pathlib.Path(folder) / "home"
        work = pathlib.Path(folder) / "work"
        home.mkdir()
        work.mkdir()
        command, more = agent(home, proxy.url)
        environment = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        environment |= {"HOME": str(home), "XDG_CONFIG_HOME": str(home), "NO_COLOR": "1", **more}
        done = subprocess.run(
            [PROGRAMS / command[0], *command[1:], "Say hello."],
            cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240, check=False,
        )
    proxy.shutdown()
    said = f"{command[0]} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert done.returncode == 0 and not proxy.failures, f"{proxy.failures}\n{said}"
    assert proxy.asked > 0, f"nothing was asked\n{said}"
    assert not forces or proxy.came_back, f"what the command wrote did not come back\n{said}"


only = sys.argv[3:]
for agent in (codex, claude, opencode):
    if only and agent.__name__ not in only:
        continue
    for forces in (False, True):
        run(agent, forces)
    print(f"{agent.__name__}: a question, and a call of its shell")
