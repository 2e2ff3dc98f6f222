"""The clients that programs use, against `ruvllm serve`: openai, anthropic, litellm, langchain-openai.

    python3 tests/clients/clients.py http://127.0.0.1:8080 http://127.0.0.1:8081

The servers have to run with `--api-key secret --temp 0`, the second with template.jinja, with which even a small model
sometimes calls several tools. Versions: requirements.txt. Every check is an assertion; the model may be any, as what it
says is only compared with what it says otherwise.
"""

import json
import os
import sys
from typing import Annotated

# Nothing but the server is asked.
os.environ.update(LITELLM_LOCAL_MODEL_COST_MAP="True", OPENAI_API_KEY="wrong", ANTHROPIC_API_KEY="wrong")

import anthropic  # noqa: E402
import litellm  # noqa: E402
import openai  # noqa: E402
from langchain_core.messages import HumanMessage, ToolMessage  # noqa: E402
from langchain_openai import ChatOpenAI, OpenAIEmbeddings  # noqa: E402
from pydantic import BaseModel, Field  # noqa: E402

BASE, LIST_BASE = (url.rstrip("/") for url in sys.argv[1:])
KEY = "secret"
QUESTION = [{"role": "user", "content": "What is a trait?"}]
CHOOSE = [{"role": "user", "content": "Choose."}]
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}
Digit = Annotated[int, Field(ge=0, le=9)]
PARAMETERS = {"name": "choose", "description": "Chooses a number.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": PARAMETERS}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "choice", "strict": True, "schema": SCHEMA}}


class Choice(BaseModel):
    n: Digit


def is_choice(value):
    """Whether it is what the schema says, as text or parsed."""
    value = json.loads(value) if isinstance(value, str) else value
    assert list(value) == ["n"] and value["n"] in range(10), value


def refused(kind, call):
    """The error that a call has to raise."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def openai_chat(c):
    chat = c.chat.completions.create
    assert len(c.models.list().data) >= 1
    whole = chat(model="m", messages=[{"role": "developer", "content": "Be short."}, *QUESTION], max_tokens=12)
    text = whole.choices[0].message.content
    assert text and whole.choices[0].finish_reason in ("stop", "length") and whole._request_id
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    # Streamed it is the same, and says how many tokens it took.
    chunks = list(chat(model="m", messages=QUESTION, max_tokens=12, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    plain = chat(model="m", messages=QUESTION, max_tokens=12)
    assert streamed == plain.choices[0].message.content and chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
    assert chat(model="m", messages=QUESTION, max_tokens=12).usage.prompt_tokens_details.cached_tokens > 0
    with c.chat.completions.stream(model="m", messages=QUESTION, max_tokens=12) as stream:
        assert "".join(event.delta for event in stream if event.type == "content.delta") == streamed
    # n, seeds, logprobs, stop.
    several = chat(model="m", messages=QUESTION, max_tokens=8, n=3, temperature=1.5, seed=7)
    again = chat(model="m", messages=QUESTION, max_tokens=8, n=3, temperature=1.5, seed=7)
    texts = [choice.message.content for choice in several.choices]
    assert len(set(texts)) > 1 and texts == [choice.message.content for choice in again.choices]
    told = chat(model="m", messages=QUESTION, max_tokens=5, logprobs=True, top_logprobs=3)
    tokens = told.choices[0].logprobs.content
    assert len(tokens) == told.usage.completion_tokens and all(len(token.top_logprobs) == 3 for token in tokens)
    assert all(token.logprob <= 0 for token in tokens)
    word = max(plain.choices[0].message.content.split(), key=len)
    stopped = chat(model="m", messages=QUESTION, max_tokens=12, stop=[word])
    assert word not in stopped.choices[0].message.content and stopped.choices[0].finish_reason == "stop"
    # Everything that is refused has its own error.
    assert refused(openai.BadRequestError, lambda: chat(model="m", messages=QUESTION, temperature=-1)).type == "invalid_request_error"
    refused(openai.AuthenticationError, lambda: openai.OpenAI(base_url=BASE + "/v1", api_key="no").models.list())
    refused(openai.NotFoundError, lambda: c.get("/nothing", cast_to=object))
    long = [{"role": "user", "content": "word " * 100_000}]
    assert refused(openai.BadRequestError, lambda: chat(model="m", messages=long)).code == "context_length_exceeded"


def openai_tools(c):
    chat = c.chat.completions.create
    schema = chat(model="m", messages=CHOOSE, response_format=FORMAT, temperature=1)
    is_choice(schema.choices[0].message.content)
    free = chat(model="m", messages=CHOOSE, response_format={"type": "json_object"}, max_tokens=200).choices[0]
    assert free.message.content.startswith("{"), free
    assert free.finish_reason == "length" or isinstance(json.loads(free.message.content), dict)
    one = chat(model="m", messages=CHOOSE, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    (call,) = one.choices[0].message.tool_calls
    assert one.choices[0].finish_reason == "tool_calls" and call.function.name == "choose" and call.id
    is_choice(call.function.arguments)
    named = {"type": "function", "function": {"name": "choose"}}
    with c.chat.completions.stream(model="m", messages=CHOOSE, tools=TOOLS, tool_choice=named, parallel_tool_calls=False) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        is_choice(stream.get_final_completion().choices[0].message.tool_calls[0].function.arguments)
    assert len(done) == 1


def openai_parallel_tools(c):
    """Several calls in a message: each has its own name, place and result."""
    chat = c.chat.completions.create
    several = {"model": "m", "messages": CHOOSE, "tools": TOOLS, "tool_choice": "required", "temperature": 1, "max_tokens": 400}
    # A small model calls once, or on until it is cut off, but where the end is a little likelier for some seeds.
    text = c.get(LIST_BASE + "/props", cast_to=object)["eos_token"]
    (end,) = c.post(LIST_BASE + "/tokenize", body={"content": text, "add_special": False, "parse_special": True}, cast_to=object)["tokens"]
    ways = ({"seed": seed, "logit_bias": {str(end): bias}} for bias in (5, 6, 7) for seed in range(30))
    replies = ((way, chat(**several, **way)) for way in ways)
    ended = ((way, reply) for way, reply in replies if reply.choices[0].finish_reason == "tool_calls")
    way, both = next((way, reply) for way, reply in ended if len(reply.choices[0].message.tool_calls) > 1)
    calls = both.choices[0].message.tool_calls
    assert len({call.id for call in calls}) == len(calls), both
    streamed = {}
    for chunk in chat(stream=True, **several, **way):
        for call in chunk.choices[0].delta.tool_calls or []:
            streamed[call.index] = streamed.get(call.index, "") + (call.function.arguments or "")
    assert [streamed[i] for i in range(len(calls))] == [call.function.arguments for call in calls]
    for call in calls:
        is_choice(call.function.arguments)
    results = [{"role": "tool", "tool_call_id": call.id, "content": "done"} for call in calls]
    history = [*CHOOSE, both.choices[0].message.model_dump(exclude_none=True), *results]
    assert chat(model="m", messages=history, tools=TOOLS, max_tokens=4).choices[0].finish_reason


def openai_others(c):
    text = c.completions.create(model="m", prompt="Ownership is", max_tokens=8, logprobs=2)
    assert len(text.choices[0].logprobs.tokens) == 8 and text.usage.completion_tokens == 8
    parts = c.completions.create(model="m", prompt="Ownership is", max_tokens=8, stream=True)
    assert "".join(part.choices[0].text for part in parts) == text.choices[0].text
    short, plain = (c.embeddings.create(model="m", input=["one", "two words"], encoding_format=form) for form in ("base64", "float"))
    import base64
    import struct
    for a, b in zip(short.data, plain.data):
        raw = base64.b64decode(a.embedding) if isinstance(a.embedding, str) else None
        a = struct.unpack(f"<{len(raw) // 4}f", raw) if raw else a.embedding
        assert max(abs(x - y) for x, y in zip(a, b.embedding)) < 1e-6
    assert plain.usage.prompt_tokens > 0


def openai_responses(c):
    create = c.responses.create
    whole = create(model="m", input="What is a trait?", instructions="Be short.", max_output_tokens=12)
    assert whole.output_text and whole.usage.output_tokens <= 12
    assert whole.status in ("completed", "incomplete")
    with c.responses.stream(model="m", input=[{"role": "user", "content": [{"type": "input_text", "text": "What is a trait?"}]}],
                            instructions="Be short.", max_output_tokens=12) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    # The client takes an answer that was cut off for no final one.
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")
    tools = [{"type": "function", **PARAMETERS, "strict": True}]
    called = create(model="m", input="Choose", tools=tools, tool_choice="required", parallel_tool_calls=False)
    call = called.output[-1]
    assert call.type == "function_call"
    is_choice(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "ok"}
    create(model="m", input=[*CHOOSE, call.model_dump(), result], tools=tools, max_output_tokens=4)
    with c.responses.stream(model="m", input="Choose", tools=tools, tool_choice={"type": "function", "name": "choose"},
                            parallel_tool_calls=False) as stream:
        assert "response.function_call_arguments.done" in {event.type for event in stream}
        is_choice(stream.get_final_response().output[-1].arguments)
    form = {"format": {"type": "json_schema", "name": "choice", "schema": SCHEMA, "strict": True}}
    is_choice(create(model="m", input="Choose", text=form).output_text)
    assert c.responses.parse(model="m", input="Choose", text_format=Choice).output_parsed.n in range(10)
    refused(openai.BadRequestError, lambda: create(model="m", input="x", previous_response_id="resp_1"))
    told = create(model="m", input="Choose", include=["message.output_text.logprobs"], top_logprobs=2, max_output_tokens=3)
    logprobs = told.output[0].content[0].logprobs
    assert len(logprobs) == 3 and all(len(token.top_logprobs) == 2 for token in logprobs)


def openai_responses_tools(c):
    """Tools of a namespace and tools that take a text: called, and their results given back."""
    namespace = {"type": "namespace", "name": "agents", "description": "d", "tools": [{"type": "function", **PARAMETERS}]}
    lark = "start: WORD LF\nWORD: /[a-z]{1,5}/\n%import common.LF"
    text = {"type": "custom", "name": "write", "description": "Writes.", "format": {"type": "grammar", "syntax": "lark", "definition": lark}}
    tools = [namespace, text, {"type": "web_search"}]
    for name, space, output in (("choose", "agents", "function_call_output"), ("write", None, "custom_tool_call_output")):
        choice = {"type": "function", "name": name, "namespace": space} if space else {"type": "custom", "name": name}
        with c.responses.stream(model="m", input="Go", tools=tools, tool_choice=choice, parallel_tool_calls=False) as stream:
            list(stream)
            call = stream.get_final_response().output[-1]
        assert (call.name, call.namespace) == (name, space), call
        is_choice(call.arguments) if space else None
        assert space or call.input[:-1].isalpha() and call.input.endswith("\n"), call
        result = {"type": output, "call_id": call.call_id, "output": "done"}
        history = [{"role": "user", "content": "Go"}, call.model_dump(exclude_none=True), result]
        more = c.responses.with_raw_response.create(model="m", input=history, tools=tools, max_output_tokens=4)
        assert more.headers["x-ruvllm-ignored"] == "tools[2]" and more.parse().output


def anthropic_messages(c):
    create = c.messages.create
    whole = create(model="m", max_tokens=12, system="Be short.", messages=QUESTION)
    assert whole.content[0].text and whole.stop_reason in ("end_turn", "max_tokens", "stop_sequence") and whole.usage.input_tokens > 0
    with c.messages.stream(model="m", max_tokens=12, system="Be short.", messages=QUESTION) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        assert stream.get_final_message().stop_reason == whole.stop_reason
    tools = [{"name": "choose", "description": "Chooses a number.", "input_schema": SCHEMA}]
    one = {"type": "any", "disable_parallel_tool_use": True}
    called = create(model="m", max_tokens=200, tools=tools, tool_choice=one, messages=CHOOSE)
    call = called.content[-1]
    assert called.stop_reason == "tool_use" and call.type == "tool_use"
    is_choice(call.input)
    result = [{"type": "tool_result", "tool_use_id": call.id, "content": "ok"}, {"type": "text", "text": "Go on."}]
    said = {"role": "assistant", "content": [block.model_dump() for block in called.content]}
    create(model="m", max_tokens=4, tools=tools, messages=[*CHOOSE, said, {"role": "user", "content": result}])
    named = {"type": "tool", "name": "choose", "disable_parallel_tool_use": True}
    with c.messages.stream(model="m", max_tokens=200, tools=tools, tool_choice=named, messages=CHOOSE) as stream:
        assert {"message_start", "content_block_start", "content_block_delta", "message_stop"} <= {event.type for event in stream}
        is_choice(stream.get_final_message().content[-1].input)
    assert c.messages.count_tokens(model="m", system="Be short.", messages=QUESTION).input_tokens == (
        whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0))
    word = max(whole.content[0].text.split(), key=len)
    stopped = create(model="m", max_tokens=12, system="Be short.", messages=QUESTION, stop_sequences=[word])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    begun = create(model="m", max_tokens=8, messages=[*QUESTION, {"role": "assistant", "content": "A trait is"}])
    assert begun.content[0].text and begun._request_id.startswith("req_")
    models = list(c.models.list())
    assert models[0].max_input_tokens > 0 and c.models.retrieve(models[0].id).created_at == models[0].created_at
    assert c.messages.parse(model="m", max_tokens=60, messages=CHOOSE, output_format=Choice).parsed_output.n in range(10)
    calls = []

    @anthropic.beta_tool
    def choose(n: Digit) -> str:
        """Chooses a number."""
        calls.append(n)
        return "done"

    runner = c.beta.messages.tool_runner(model="m", max_tokens=60, tools=[choose], tool_choice=one, messages=CHOOSE, max_iterations=2)
    assert len(list(runner)) == 2 and len(calls) >= 1 and all(n in range(10) for n in calls)
    for kind, status, call in (
        (anthropic.NotFoundError, 404, lambda: c.models.retrieve("nothing")),
        (anthropic.APIStatusError, 413, lambda: create(model="m", max_tokens=5, messages=[{"role": "user", "content": "a" * (34 << 20)}])),
        (anthropic.BadRequestError, 400, lambda: create(model="m", max_tokens=5, messages=[{"role": "user", "content": "word " * 100_000}])),
    ):
        error = refused(kind, call)
        assert error.status_code == status and error.request_id == error.body["request_id"], error
    assert "prompt is too long: " in str(error)
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    refused(anthropic.BadRequestError, lambda: create(model="m", max_tokens=5, messages=[{"role": "user", "content": [image]}]))
    refused(anthropic.AuthenticationError, lambda: anthropic.Anthropic(base_url=BASE, api_key="no").messages.create(
        model="m", max_tokens=5, messages=QUESTION))


def with_litellm():
    at = {"api_base": BASE + "/v1", "api_key": KEY}
    chat = lambda **more: litellm.completion(model="openai/m", **at, **more)
    whole = chat(messages=QUESTION, max_tokens=12)
    chunks = chat(messages=QUESTION, max_tokens=12, stream=True, stream_options={"include_usage": True})
    streamed = litellm.stream_chunk_builder(list(chunks), messages=QUESTION)
    assert streamed.choices[0].message.content == whole.choices[0].message.content
    assert streamed.usage.completion_tokens == whole.usage.completion_tokens
    assert len(chat(messages=QUESTION, max_tokens=4, n=2).choices) == 2
    assert chat(messages=QUESTION, max_tokens=4, logprobs=True, top_logprobs=2).choices[0].logprobs
    is_choice(chat(messages=CHOOSE, response_format=FORMAT).choices[0].message.content)
    called = chat(messages=CHOOSE, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    is_choice(called.choices[0].message.tool_calls[0].function.arguments)
    assert len(litellm.embedding(model="openai/m", input=["one", "two"], **at).data) == 2
    assert litellm.text_completion(model="text-completion-openai/m", prompt="Ownership is", max_tokens=4, **at).choices[0].text
    assert litellm.responses(model="openai/m", input="What is a trait?", max_output_tokens=8, **at).output
    # As a server of Anthropic's API, too.
    claude = litellm.completion(model="anthropic/m", api_base=BASE, api_key=KEY, messages=QUESTION, max_tokens=12)
    assert claude.choices[0].message.content
    refused(litellm.AuthenticationError, lambda: litellm.completion(model="openai/m", api_base=BASE + "/v1", api_key="no",
                                                                    messages=QUESTION, max_retries=0))
    refused(litellm.BadRequestError, lambda: chat(messages=QUESTION, temperature=-1))


def with_langchain():
    model = ChatOpenAI(model="m", base_url=BASE + "/v1", api_key=KEY, max_tokens=12, temperature=0, stream_usage=True)
    whole = model.invoke("What is a trait?")
    assert whole.content and whole.usage_metadata["total_tokens"] > 0
    parts = list(model.stream("What is a trait?"))
    assert "".join(part.content for part in parts) == whole.content
    assert len(model.batch(["One", "Two", "Three"])) == 3
    assert model.bind(logprobs=True).invoke("What is a trait?").response_metadata["logprobs"]["content"]
    assert model.bind(stop=[max(whole.content.split(), key=len)]).invoke("What is a trait?").content != whole.content
    is_choice(model.bind(max_tokens=None).with_structured_output(FORMAT["json_schema"]["schema"] | {"title": "choice"},
                                                                  method="json_schema").invoke("Choose."))
    bound = model.bind_tools(TOOLS, tool_choice="required", parallel_tool_calls=False)
    called = bound.bind(max_tokens=None).invoke("Choose.")
    is_choice(called.tool_calls[0]["args"])
    results = [ToolMessage("done", tool_call_id=call["id"]) for call in called.tool_calls]
    model.bind_tools(TOOLS).invoke([HumanMessage("Choose."), called, *results])
    embeddings = OpenAIEmbeddings(model="m", base_url=BASE + "/v1", api_key=KEY, check_embedding_ctx_length=False)
    assert len(embeddings.embed_documents(["one", "two"])) == 2
    responses = ChatOpenAI(model="m", base_url=BASE + "/v1", api_key=KEY, max_tokens=12, use_responses_api=True)
    assert responses.invoke("What is a trait?").text


def main():
    c = openai.OpenAI(base_url=BASE + "/v1", api_key=KEY, max_retries=0)
    a = anthropic.Anthropic(base_url=BASE, api_key=KEY, max_retries=0)
    of_lists = openai.OpenAI(base_url=LIST_BASE + "/v1", api_key=KEY, max_retries=0)
    checks = [
        ("openai: chat", lambda: openai_chat(c)), ("openai: schema, tools", lambda: openai_tools(c)),
        ("openai: parallel tools", lambda: openai_parallel_tools(of_lists)),
        ("openai: completions, embeddings", lambda: openai_others(c)), ("openai: responses", lambda: openai_responses(c)),
        ("openai: responses, tools", lambda: openai_responses_tools(c)),
        ("anthropic: messages", lambda: anthropic_messages(a)), ("litellm", with_litellm), ("langchain-openai", with_langchain),
    ]
    for name, check in checks:
        check()
        print(f"{name}: as it should be", flush=True)


main()
