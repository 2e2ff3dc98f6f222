//! A call in each of the forms in which models write them; the program's tests read them, too.

/// A call of `get_weather` in each format: its name, the opening, the rest.
pub(crate) const CALLS: &[(&str, &str, &str)] = &[
    (
        "hermes",
        "<tool_call>",
        "\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\", \"days\": 3, \"unit\": \"celsius\"}}\n</tool_call>",
    ),
    (
        "phi4",
        "<|tool_call|>",
        "{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\", \"days\": 3, \"unit\": \"celsius\"}}<|/tool_call|>",
    ),
    (
        "granite",
        "<|tool_call|>",
        "[{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\", \"days\": 3, \"unit\": \"celsius\"}}]",
    ),
    (
        "command-r",
        "<|START_ACTION|>",
        "[\n    {\"tool_call_id\": \"0\", \"tool_name\": \"get_weather\", \"parameters\": {\"city\": \"Oslo\", \"days\": 3, \"unit\": \"celsius\"}}\n]<|END_ACTION|>",
    ),
    (
        "mistral",
        "[TOOL_CALLS]",
        "[{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\", \"days\": 3, \"unit\": \"celsius\"}}]",
    ),
    (
        "mistral-v11",
        "[TOOL_CALLS]",
        "get_weather[ARGS]{\"city\": \"Oslo\", \"days\": 3, \"unit\": \"celsius\"}",
    ),
    (
        "deepseek",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{\"city\": \"Oslo\", \"days\": 3, \"unit\": \"celsius\"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    (
        "deepseek-v3.1",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{\"city\": \"Oslo\", \"days\": 3, \"unit\": \"celsius\"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    (
        "kimi",
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{\"city\": \"Oslo\", \"days\": 3, \"unit\": \"celsius\"}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    (
        "glm",
        "<tool_call>",
        "get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>unit</arg_key>\n<arg_value>celsius</arg_value>\n</tool_call>",
    ),
    (
        "qwen3-coder",
        "<tool_call>",
        "\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=unit>\ncelsius\n</parameter>\n</function>\n</tool_call>",
    ),
    (
        "minimax",
        "<minimax:tool_call>",
        "\n<invoke name=\"get_weather\">\n<parameter name=\"city\">Oslo</parameter>\n<parameter name=\"days\">3</parameter>\n<parameter name=\"unit\">celsius</parameter>\n</invoke>\n</minimax:tool_call>",
    ),
    (
        "functionary-v3.1",
        "<function=",
        "get_weather>{\"city\": \"Oslo\", \"days\": 3, \"unit\": \"celsius\"}</function>",
    ),
    (
        "functionary-v3.2",
        ">>>",
        "get_weather\n{\"city\": \"Oslo\", \"days\": 3, \"unit\": \"celsius\"}",
    ),
    (
        "harmony",
        "<|channel|>commentary to=functions.",
        "get_weather <|constrain|>json<|message|>{\"city\": \"Oslo\", \"days\": 3, \"unit\": \"celsius\"}",
    ),
    (
        "lfm2",
        "<|tool_call_start|>",
        "[get_weather(city=\"Oslo\", days=3, unit=\"celsius\")]<|tool_call_end|>",
    ),
    (
        "gemma4",
        "<|tool_call>",
        "call:get_weather{city:<|\"|>Oslo<|\"|>,days:3,unit:<|\"|>celsius<|\"|>}<tool_call|>",
    ),
    (
        "function-gemma",
        "<start_function_call>",
        "call:get_weather{city:<escape>Oslo<escape>,days:3,unit:<escape>celsius<escape>}<end_function_call>",
    ),
    (
        "seed-oss",
        "<seed:tool_call>",
        "\n<function=get_weather>\n<parameter=city>Oslo</parameter>\n<parameter=days>3</parameter>\n<parameter=unit>celsius</parameter>\n</function>\n</seed:tool_call>",
    ),
    (
        "deepseek-v3.2",
        "<｜DSML｜function_calls>",
        "\n<｜DSML｜invoke name=\"get_weather\">\n<｜DSML｜parameter name=\"city\" string=\"true\">Oslo</｜DSML｜parameter>\n<｜DSML｜parameter name=\"days\" string=\"false\">3</｜DSML｜parameter>\n<｜DSML｜parameter name=\"unit\" string=\"true\">celsius</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    ),
    (
        "deepseek-v4",
        "<｜DSML｜tool_calls>",
        "\n<｜DSML｜invoke name=\"get_weather\">\n<｜DSML｜parameter name=\"city\" string=\"true\">Oslo</｜DSML｜parameter>\n<｜DSML｜parameter name=\"days\" string=\"false\">3</｜DSML｜parameter>\n<｜DSML｜parameter name=\"unit\" string=\"true\">celsius</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
    ),
    (
        "kimi-k3",
        "<|open|>tools<|sep|>",
        "<|open|>call tool=\"get_weather\" index=\"1\"<|sep|><|open|>argument key=\"city\" type=\"string\"<|sep|>Oslo<|close|>argument<|sep|><|open|>argument key=\"days\" type=\"number\"<|sep|>3<|close|>argument<|sep|><|open|>argument key=\"unit\" type=\"string\"<|sep|>celsius<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
    ),
    (
        "minimax-m3",
        "]<]minimax[>[<tool_call>",
        "\n]<]minimax[>[<invoke name=\"get_weather\">]<]minimax[>[<city>Oslo]<]minimax[>[</city>]<]minimax[>[<days>3]<]minimax[>[</days>]<]minimax[>[<unit>celsius]<]minimax[>[</unit>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
    ),
    (
        "lfm2.5",
        "<|tool_call_start|>",
        "[get_weather(city=\"Oslo\", days=3, unit=\"celsius\")]<|tool_call_end|>",
    ),
    (
        "muse-glimmer",
        "<atem:function_calls>",
        "\n<atem:invoke name=\"get_weather\">\n<atem:parameter name=\"city\">Oslo</atem:parameter>\n<atem:parameter name=\"days\">3</atem:parameter>\n<atem:parameter name=\"unit\">celsius</atem:parameter>\n</atem:invoke>\n</atem:function_calls>",
    ),
    (
        "solar-open",
        "<|tool_call:begin|>",
        "a1b2<|tool_call:name|>get_weather<|tool_call:args|>{\"city\": \"Oslo\", \"days\": 3, \"unit\": \"celsius\"}<|tool_call:end|>",
    ),
    (
        "hy3",
        "<tool_calls:opensource>",
        "\n<tool_call:opensource>get_weather<tool_sep:opensource>\n<arg_key:opensource>city</arg_key:opensource>\n<arg_value:opensource>Oslo</arg_value:opensource>\n<arg_key:opensource>days</arg_key:opensource>\n<arg_value:opensource>3</arg_value:opensource>\n<arg_key:opensource>unit</arg_key:opensource>\n<arg_value:opensource>celsius</arg_value:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>",
    ),
    (
        "minicpm5",
        "<function name=\"",
        "get_weather\"><param name=\"city\">Oslo</param><param name=\"days\">3</param><param name=\"unit\">celsius</param></function>",
    ),
    (
        "apertus",
        "<|tools_prefix|>",
        "[{\"get_weather\": {\"city\": \"Oslo\", \"days\": 3, \"unit\": \"celsius\"}}]<|tools_suffix|>",
    ),
    (
        "apriel",
        "<tool_calls>",
        "[{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\", \"days\": 3, \"unit\": \"celsius\"}}]</tool_calls>",
    ),
    (
        "minimax-m1",
        "<tool_calls>",
        "\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\", \"days\": 3, \"unit\": \"celsius\"}}\n</tool_calls>",
    ),
    (
        "nemotron-v2",
        "<TOOLCALL>",
        "[{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\", \"days\": 3, \"unit\": \"celsius\"}}]</TOOLCALL>",
    ),
    (
        "gigachat3.1",
        "<|function_call|>",
        "{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\", \"days\": 3, \"unit\": \"celsius\"}}",
    ),
    (
        "gigachat3",
        "<|message_sep|>\n\nfunction call<|role_sep|>\n",
        "{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\", \"days\": 3, \"unit\": \"celsius\"}}",
    ),
    (
        "firefunction-v2",
        "functools",
        "[{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\", \"days\": 3, \"unit\": \"celsius\"}}]",
    ),
    (
        "command-r-plus",
        "Action:\n```json\n",
        "[{\"tool_name\": \"get_weather\", \"parameters\": {\"city\": \"Oslo\", \"days\": 3, \"unit\": \"celsius\"}}]```",
    ),
    (
        "llama3",
        "",
        "{\"name\": \"get_weather\", \"parameters\": {\"city\": \"Oslo\", \"days\": 3, \"unit\": \"celsius\"}}",
    ),
    (
        "generic",
        "",
        "{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\", \"days\": 3, \"unit\": \"celsius\"}}",
    ),
];
