"""Ollama's own client for Python against `ruvllm serve`: python ollama_client.py URL [KEY]"""

import sys

from ollama import Client, ResponseError

url = sys.argv[1]
headers = {"Authorization": f"Bearer {sys.argv[2]}"} if len(sys.argv) > 2 else {}
client = Client(host=url, headers=headers)
name = client.list().models[0].model
options = {"num_predict": 12, "temperature": 0}
messages = [{"role": "user", "content": "What is ownership?"}]

whole = client.chat(model=name, messages=messages, options=options)
assert whole.done and whole.message.role == "assistant" and whole.eval_count == 12, whole
parts = list(client.chat(model=name, messages=messages, options=options, stream=True))
assert len(parts) > 3 and parts[-1].done and parts[-1].done_reason == "length", parts[-1]
assert "".join(part.message.content for part in parts) == whole.message.content
assert client.chat(model=f"{name}:latest", messages=messages, options=options).message == whole.message

one = client.generate(model=name, prompt="Ownership is", raw=True, options=options)
parts = client.generate(model=name, prompt="Ownership is", raw=True, options=options, stream=True)
assert "".join(part.response for part in parts) == one.response and one.response

schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
          "required": ["n"], "additionalProperties": False}
answer = client.chat(model=name, messages=messages, format=schema, options={"temperature": 0})
assert answer.message.content.startswith("{"), answer


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
      a: The first.
      b: The second.
    """
    return a + b


# A small model calls nothing by itself; the tools are taken, and a whole round of them.
client.chat(model=name, messages=messages, tools=[add], options=options)
calls = [{"function": {"name": "add", "arguments": {"a": 1, "b": 2}}}]
told = [*messages, {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_name": "add", "content": "3"}]
assert client.chat(model=name, messages=told, tools=[add], options=options, think=False).done

vectors = client.embed(model=name, input=["one", "two"])
assert len(vectors.embeddings) == 2 and vectors.prompt_eval_count > 1, vectors
assert client.embeddings(model=name, prompt="one").embedding == vectors.embeddings[0]

shown = client.show(name)
assert "completion" in shown.capabilities and shown.modelinfo["general.architecture"], shown
assert client.ps().models[0].model == name and client.ps().models[0].expires_at.year > 2100
assert client.generate(model=name, keep_alive=0).done_reason == "unload"
assert not client.ps().models
assert client.generate(model=name, keep_alive="5m").done_reason == "load"
assert client.ps().models[0].expires_at

for call, status in [(lambda: client.chat(model="llama9", messages=messages), 404),
                     (lambda: client.pull("llama9"), 501),
                     (lambda: client.delete("llama9"), 501),
                     (lambda: client.copy("a", "b"), 501),
                     (lambda: client.chat(model=name, messages=messages, keep_alive="soon"), 400)]:
    try:
        call()
    except ResponseError as error:
        assert error.status_code == status and error.error, (error.status_code, error.error)
    else:
        raise AssertionError(f"expected a status {status}")
print("ollama (Python): well")
