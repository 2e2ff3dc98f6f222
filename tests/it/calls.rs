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
