"""Frameworks and the evaluation harness against `ruvllm serve`: openai-agents, pydantic-ai, LangChain, lm_eval.

    python3 tests/clients/frameworks.py http://127.0.0.1:8080 MODEL

The server has to run MODEL, whose tokenizer is BPE over bytes, with `--api-key secret --temp 0` and a grammar of short texts,
as a small model goes on for ever. Versions:
requirements-frameworks.txt.
"""

import asyncio
import json
import os
import pathlib
import subprocess
import sys
import tempfile

BASE, MODEL = sys.argv[1].rstrip("/"), sys.argv[2]
KEY = "secret"
os.environ.update(
    OPENAI_API_KEY=KEY, OPENAI_BASE_URL=f"{BASE}/v1", ANTHROPIC_API_KEY=KEY, ANTHROPIC_BASE_URL=BASE,
    OPENAI_AGENTS_DISABLE_TRACING="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false",
)

import agents  # noqa: E402
import gguf  # noqa: E402
import openai  # noqa: E402
import pydantic  # noqa: E402
import pydantic_ai  # noqa: E402
import tokenizers  # noqa: E402
from langchain_openai import ChatOpenAI  # noqa: E402
from pydantic_ai.models.anthropic import AnthropicModel  # noqa: E402
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel  # noqa: E402


class Choice(pydantic.BaseModel):
    n: int = pydantic.Field(ge=0, le=9)


def openai_agents():
    """A required call of a tool, in both APIs; what it returns is sent back, and ends the run."""
    for model in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
        chosen = []

        @agents.function_tool
        def choose(n: int) -> str:
            """Chooses a number."""
            chosen.append(n)
            return "chosen"

        agent = agents.Agent(
            name="Chooser",
            instructions="Be short.",
            model=model("m", openai.AsyncOpenAI()),
            tools=[choose],
            model_settings=agents.ModelSettings(tool_choice="required", parallel_tool_calls=False),
        )
        result = agents.Runner.run_sync(agent, "Choose.", max_turns=3)
        assert chosen and isinstance(result.final_output, str), result


def pydantic_agents():
    """Output of a type, which this framework asks for as a call of a tool, and as a format."""
    settings = {"max_tokens": 64, "temperature": 0}
    for model in (OpenAIChatModel("m"), OpenAIResponsesModel("m"), AnthropicModel("m")):
        agent = pydantic_ai.Agent(model, output_type=Choice, model_settings=settings)
        assert agent.run_sync("Choose.").output.n in range(10)
    native = pydantic_ai.Agent(
        OpenAIChatModel("m"), output_type=pydantic_ai.NativeOutput(Choice), model_settings=settings
    )
    assert native.run_sync("Choose.").output.n in range(10)

    async def streamed():
        agent = pydantic_ai.Agent(OpenAIChatModel("m"), output_type=Choice, model_settings=settings)
        async with agent.run_stream("Choose.") as run:
            return await run.get_output()

    assert asyncio.run(streamed()).n in range(10)


def langchain():
    """Structured output by each of its methods."""
    model = ChatOpenAI(model="m", max_tokens=64, temperature=0)
    for method in ("function_calling", "json_schema"):
        choice = model.with_structured_output(Choice, method=method).invoke("Choose.")
        assert choice.n in range(10), choice


def tokenizer(folder):
    """The model's tokenizer in Hugging Face's form."""
    fields = gguf.GGUFReader(MODEL).fields
    tokens, merges = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges"))
    model = tokenizers.models.BPE(
        vocab={token: i for i, token in enumerate(tokens)}, merges=[tuple(merge.split(" ")) for merge in merges]
    )
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


LIKELIHOOD = """
task: ten_choices
dataset_path: json
dataset_kwargs: {data_files: LINES}
test_split: train
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""
GENERATION = """
task: ten_answers
dataset_path: json
dataset_kwargs: {data_files: LINES}
test_split: train
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, do_sample: false, temperature: 0}
metric_list: [{metric: exact_match}]
"""


def lm_eval():
    """Log-likelihoods of answers, from token ids and an echo, and generated ones."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        tokenizer(folder)
        lines = folder / "lines.json"
        line = {"question": "Ownership is", "choices": [" a set of rules", " zzz qqq xxx"], "answer": 0}
        lines.write_text("".join(json.dumps(line | {"question": f"{i}. Ownership is"}) + "\n" for i in range(10)))
        for text, task in ((LIKELIHOOD, "ten_choices"), (GENERATION, "ten_answers")):
            (folder / f"{task}.yaml").write_text(text.replace("LINES", str(lines)))
        arguments = f"model=m,base_url={BASE}/v1/completions,tokenizer={folder},num_concurrent=2,max_retries=1"
        done = subprocess.run(
            [
                sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args", arguments,
                "--tasks", "ten_choices,ten_answers", "--include_path", str(folder), "--output_path", str(folder / "out"),
            ],
            env=os.environ | {"HF_HOME": str(folder)}, capture_output=True, text=True, timeout=600, check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        results = json.loads(next((folder / "out").rglob("results*.json")).read_text())["results"]
        # A model that has read a book about it prefers words.
        assert results["ten_choices"]["acc,none"] == 1.0, results
        assert "exact_match,none" in results["ten_answers"], results


for client in (langchain, openai_agents, pydantic_agents, lm_eval):
    client()
    print(f"{client.__name__}: as it should be")
