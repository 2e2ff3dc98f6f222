"""Two replicas of `ruvllm serve` behind LiteLLM's proxy: both work, and when one is killed the other answers.

    python3 tests/clients/proxy.py PROGRAM
"""

import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

import openai

CONFIG = """
model_list:
  - {{model_name: m, litellm_params: {{model: openai/m, api_base: "{}/v1", api_key: secret}}}}
  - {{model_name: m, litellm_params: {{model: openai/m, api_base: "{}/v1", api_key: secret}}}}
router_settings: {{routing_strategy: simple-shuffle, num_retries: 3, allowed_fails: 1, cooldown_time: 60}}
general_settings: {{master_key: sk-proxy}}
"""


@contextlib.contextmanager
def running(command, **more):
    process = subprocess.Popen(command, **more)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def address_of(server):
    for line in server.stderr:
        if found := re.search(r"ready on (http://\S+)", line):
            return found[1]
    raise SystemExit("a replica ended")


def n_answered(address):
    request = urllib.request.Request(address + "/metrics", headers={"authorization": "Bearer secret"})
    with urllib.request.urlopen(request, timeout=10) as response:
        return int(re.search(r"^vllm:request_success\S* (\d+)", response.read().decode(), re.M)[1])


def main():
    program, folder = sys.argv[1], tempfile.mkdtemp()
    replica = [program, "serve", "--port", "0", "--temp", "0", "-c", "32768", "-t", "1", "--api-key", "secret"]
    with contextlib.ExitStack() as stack:
        replicas = [stack.enter_context(running(replica, stderr=subprocess.PIPE, text=True)) for _ in range(2)]
        addresses = [address_of(server) for server in replicas]
        config = os.path.join(folder, "config.yaml")
        with open(config, "w") as file:
            file.write(CONFIG.format(*addresses))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        litellm = os.path.join(os.path.dirname(sys.executable), "litellm")
        environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "127.0.0.1"}
        command = [litellm, "--config", config, "--host", "127.0.0.1", "--port", str(port)]
        log = open(os.path.join(folder, "log"), "w+")
        proxy = stack.enter_context(running(command, env=environment, stdout=log, stderr=log))
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="sk-proxy", max_retries=0, timeout=60)
        ask = lambda **more: client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hello"}], **more)
        for _ in range(240):
            with contextlib.suppress(openai.APIConnectionError, openai.InternalServerError):
                client.models.list()
                break
            if proxy.poll() is not None:
                log.seek(0)
                raise SystemExit(log.read())
            time.sleep(0.5)

        # Both are asked.
        for _ in range(24):
            assert ask(max_tokens=4).choices[0].message.content
        shares = [n_answered(address) for address in addresses]
        assert min(shares) > 0 and sum(shares) == 24, shares

        # One is killed while streams run: those of the other come to their ends.
        outcomes, begun = [], threading.Barrier(9)

        def stream():
            n, reason, waiting = 0, None, True
            try:
                for chunk in ask(max_tokens=600, stream=True, extra_body={"ignore_eos": True}):
                    if waiting:
                        waiting = False
                        begun.wait(60)
                    n += 1
                    reason = chunk.choices[0].finish_reason if chunk.choices else reason
            except (openai.OpenAIError, ConnectionError):
                reason = None
            except Exception as error:  # what httpx raises of a connection that broke
                reason = None if "httpx" in type(error).__module__ or "httpcore" in type(error).__module__ else error
            outcomes.append((n, reason))

        threads = [threading.Thread(target=stream) for _ in range(8)]
        [thread.start() for thread in threads]
        begun.wait(60)
        replicas[0].kill()
        [thread.join() for thread in threads]
        n_whole = sum(reason == "length" for _, reason in outcomes)
        expected = n_answered(addresses[1]) - shares[1]
        assert len(outcomes) == 8 and n_whole >= expected > 0, (outcomes, expected)

        # Whoever comes now is answered by the one that is left.
        for _ in range(12):
            assert ask(max_tokens=4).choices[0].message.content
        print(f"LiteLLM's proxy: {shares} answers; {n_whole} of 8 streams whole after a replica was killed")


main()
