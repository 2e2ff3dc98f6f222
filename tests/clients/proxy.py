"""Two replicas of `ruvllm serve` behind LiteLLM's proxy and behind SGLang's router: both work, and when one is killed the
other answers. The router sends what begins alike to the replica that has it in its cache.

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


def metric(address, name):
    request = urllib.request.Request(address + "/metrics", headers={"authorization": "Bearer secret"})
    with urllib.request.urlopen(request, timeout=10) as response:
        return int(re.search(rf"^vllm:{name}\S* (\d+)", response.read().decode(), re.M)[1])


def n_answered(address):
    return metric(address, "request_success")


def litellm(addresses, port, folder):
    config = os.path.join(folder, "config.yaml")
    with open(config, "w") as file:
        file.write(CONFIG.format(*addresses))
    program = os.path.join(os.path.dirname(sys.executable), "litellm")
    return [program, "--config", config, "--host", "127.0.0.1", "--port", str(port)]


def sglang(addresses, port, _folder):
    command = [sys.executable, "-m", "sglang_router.launch_router", "--worker-urls", *addresses]
    # Prompts that have at least this share in common with an earlier one go where that went.
    command += ["--policy", "cache_aware", "--cache-threshold", "0.5"]
    # Unless one is busier than the other by this many requests.
    command += ["--balance-abs-threshold", "2", "--balance-rel-threshold", "1.0"]
    command += ["--health-check-interval-secs", "1", "--health-failure-threshold", "1", "--cb-failure-threshold", "1"]
    return [*command, "--host", "127.0.0.1", "--port", str(port), "--api-key", "secret"]


def behind(name, key, command_of, is_cache_aware):
    program, folder = sys.argv[1], tempfile.mkdtemp()
    replica = [program, "serve", "--port", "0", "--temp", "0", "-c", "32768", "-t", "1", "--api-key", "secret"]
    with contextlib.ExitStack() as stack:
        # Slow ones: LiteLLM, one process of Python, takes no new requests while it passes on thousands of tokens per second.
        slow = {**os.environ, "RUVLLM_ARCH": "scalar"}
        replicas = [stack.enter_context(running(replica, env=slow, stderr=subprocess.PIPE, text=True)) for _ in range(2)]
        addresses = [address_of(server) for server in replicas]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "127.0.0.1"}
        # LiteLLM ends a stream that says the same thing 100 times, as a small model does.
        environment["REPEATED_STREAMING_CHUNK_LIMIT"] = "1000000"
        log = open(os.path.join(folder, "log"), "w+")
        router = stack.enter_context(running(command_of(addresses, port, folder), env=environment, stdout=log, stderr=log))
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0, timeout=60)

        def ask(text="Hello", **more):
            return client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}], **more)

        def wait_for_an_answer():
            for _ in range(240):
                with contextlib.suppress(openai.APIConnectionError, openai.InternalServerError):
                    return ask(max_tokens=1)
                if router.poll() is not None:
                    break
                time.sleep(0.5)
            log.seek(0)
            raise SystemExit(log.read())

        wait_for_an_answer()
        before = [n_answered(address) for address in addresses]

        conversations = [" ".join(f"{word} {i}" for i in range(40)) for word in ("river", "stone", "cloud", "bread")]
        hits = 0
        for turn in range(6):
            for text in conversations:
                answer = ask(text + " and so on" * turn, max_tokens=4)
                assert answer.choices[0].message.content
                hits += turn > 0 and answer.usage.prompt_tokens_details.cached_tokens >= 100
        shares = [n_answered(address) - n for address, n in zip(addresses, before)]
        assert sum(shares) == 24, shares
        if is_cache_aware:
            assert hits == 20, f"{hits} of 20 prompts found their beginning"
        else:
            assert min(shares) > 0, shares

        # One is killed while streams run: those of the other come to their ends.
        outcomes, begun = [], threading.Barrier(9)

        def stream(i):
            n, reason, waiting = 0, None, True
            try:
                for chunk in ask(f"{i} " * 20, max_tokens=1500, stream=True, extra_body={"ignore_eos": True}):
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

        left = n_answered(addresses[1])
        threads = [threading.Thread(target=stream, args=(i,)) for i in range(8)]
        [thread.start() for thread in threads]
        begun.wait(60)
        # A stream begins before the first pass for it does.
        for _ in range(100):
            busy = [metric(address, "num_requests_running") for address in addresses]
            if sum(busy) == 8:
                break
            time.sleep(0.02)
        assert min(busy) > 0 and sum(busy) == 8, busy
        replicas[0].kill()
        [thread.join() for thread in threads]
        n_whole = sum(reason == "length" for _, reason in outcomes)
        expected = n_answered(addresses[1]) - left
        assert len(outcomes) == 8 and n_whole >= expected > 0, (outcomes, expected)

        # Whoever comes once the router has noticed is answered by the one that is left.
        wait_for_an_answer()
        for _ in range(12):
            assert ask(max_tokens=4).choices[0].message.content
        print(f"{name}: {shares} answers, {hits} of 20 with a cached beginning; {busy} streams, {n_whole} whole though one was killed")


behind("LiteLLM's proxy", "sk-proxy", litellm, False)
behind("SGLang's router", "secret", sglang, True)
