//! Chat templates under the names that llama.cpp has for them. A form of the common kind, in which
//! each message stands between two texts, is a line of [`FORMS`].

/// What stands around messages, by role.
struct Form {
    name: &'static str,
    /// Before everything.
    begin: &'static str,
    /// Instead of instructions, where there are none.
    uninstructed: &'static str,
    system: (&'static str, &'static str),
    user: (&'static str, &'static str),
    assistant: (&'static str, &'static str),
    /// The beginning of an answer.
    answer: &'static str,
}

const fn form(
    name: &'static str,
    begin: &'static str,
    system: (&'static str, &'static str),
    user: (&'static str, &'static str),
    assistant: (&'static str, &'static str),
    answer: &'static str,
) -> Form {
    Form {
        name,
        begin,
        uninstructed: "",
        system,
        user,
        assistant,
        answer,
    }
}

impl Form {
    const fn uninstructed(self, uninstructed: &'static str) -> Form {
        Form {
            uninstructed,
            ..self
        }
    }
}

const CHATML: [(&str, &str); 3] = [
    ("<|im_start|>system\n", "<|im_end|>\n"),
    ("<|im_start|>user\n", "<|im_end|>\n"),
    ("<|im_start|>assistant\n", "<|im_end|>\n"),
];

/// Templates of the common kind. Two texts stand for tokens of the model: `{bos}` and `{eos}`.
const FORMS: &[Form] = &[
    form(
        "chatml",
        "",
        CHATML[0],
        CHATML[1],
        CHATML[2],
        "<|im_start|>assistant\n",
    ),
    form(
        "llama3",
        "{bos}",
        (
            "<|start_header_id|>system<|end_header_id|>\n\n",
            "<|eot_id|>",
        ),
        ("<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"),
        (
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            "<|eot_id|>",
        ),
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    form(
        "llama4",
        "{bos}",
        ("<|header_start|>system<|header_end|>\n\n", "<|eot|>"),
        ("<|header_start|>user<|header_end|>\n\n", "<|eot|>"),
        ("<|header_start|>assistant<|header_end|>\n\n", "<|eot|>"),
        "<|header_start|>assistant<|header_end|>\n\n",
    ),
    form(
        "phi3",
        "{bos}",
        ("<|system|>\n", "<|end|>\n"),
        ("<|user|>\n", "<|end|>\n"),
        ("<|assistant|>\n", "<|end|>\n"),
        "<|assistant|>\n",
    ),
    form(
        "phi4",
        "",
        ("<|im_start|>system<|im_sep|>", "<|im_end|>"),
        ("<|im_start|>user<|im_sep|>", "<|im_end|>"),
        ("<|im_start|>assistant<|im_sep|>", "<|im_end|>"),
        "<|im_start|>assistant<|im_sep|>",
    ),
    form(
        "falcon3",
        "",
        ("<|system|>\n", "\n"),
        ("<|user|>\n", "\n"),
        ("<|assistant|>\n", "\n"),
        "<|assistant|>\n",
    ),
    form(
        "zephyr",
        "",
        ("<|system|>\n", "{eos}\n"),
        ("<|user|>\n", "{eos}\n"),
        ("<|assistant|>\n", "{eos}\n"),
        "<|assistant|>\n",
    ),
    form(
        "monarch",
        "",
        ("{bos}system\n", "</s>\n"),
        ("{bos}user\n", "</s>\n"),
        ("{bos}assistant\n", "</s>\n"),
        "{bos}assistant\n",
    ),
    form(
        "openchat",
        "{bos}",
        ("", "<|end_of_turn|>"),
        ("GPT4 Correct User: ", "<|end_of_turn|>"),
        ("GPT4 Correct Assistant: ", "<|end_of_turn|>"),
        "GPT4 Correct Assistant:",
    ),
    form(
        "vicuna",
        "{bos}",
        ("", "\n\n"),
        ("USER: ", "\n"),
        ("ASSISTANT: ", "{eos}\n"),
        "ASSISTANT:",
    ),
    form(
        "vicuna-orca",
        "{bos}",
        ("SYSTEM: ", "\n"),
        ("USER: ", "\n"),
        ("ASSISTANT: ", "{eos}\n"),
        "ASSISTANT:",
    ),
    form(
        "deepseek",
        "{bos}",
        ("", ""),
        ("### Instruction:\n", "\n"),
        ("### Response:\n", "\n<|EOT|>\n"),
        "### Response:\n",
    ),
    form(
        "deepseek2",
        "{bos}",
        ("", "\n\n"),
        ("User: ", "\n\n"),
        ("Assistant: ", "{eos}"),
        "Assistant:",
    ),
    form(
        "deepseek3",
        "{bos}",
        ("", ""),
        ("<｜User｜>", ""),
        ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
        "<｜Assistant｜>",
    ),
    form(
        "command-r",
        "{bos}",
        (
            "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>",
            "<|END_OF_TURN_TOKEN|>",
        ),
        (
            "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>",
            "<|END_OF_TURN_TOKEN|>",
        ),
        (
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
            "<|END_OF_TURN_TOKEN|>",
        ),
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    ),
    form(
        "chatglm4",
        "[gMASK]<sop>",
        ("<|system|>\n", ""),
        ("<|user|>\n", ""),
        ("<|assistant|>\n", ""),
        "<|assistant|>\n",
    ),
    form(
        "minicpm",
        "{bos}",
        ("", ""),
        ("<用户>", "<AI>"),
        ("", ""),
        "",
    ),
    form(
        "exaone3",
        "",
        ("[|system|]", "[|endofturn|]\n"),
        ("[|user|]", "\n"),
        ("[|assistant|]", "[|endofturn|]\n"),
        "[|assistant|]",
    ),
    form(
        "exaone4",
        "",
        ("[|system|]\n", "[|endofturn|]\n"),
        ("[|user|]\n", "\n"),
        ("[|assistant|]\n", "[|endofturn|]\n"),
        "[|assistant|]\n",
    ),
    form(
        "rwkv-world",
        "{bos}",
        ("System: ", "\n\n"),
        ("User: ", "\n\n"),
        ("Assistant: ", "\n\n"),
        "Assistant:",
    ),
    form(
        "granite",
        "",
        (
            "<|start_of_role|>system<|end_of_role|>",
            "<|end_of_text|>\n",
        ),
        ("<|start_of_role|>user<|end_of_role|>", "<|end_of_text|>\n"),
        (
            "<|start_of_role|>assistant<|end_of_role|>",
            "<|end_of_text|>\n",
        ),
        "<|start_of_role|>assistant<|end_of_role|>",
    ),
    form(
        "megrez",
        "",
        ("<|role_start|>system<|role_end|>", "<|turn_end|>"),
        ("<|role_start|>user<|role_end|>", "<|turn_end|>"),
        ("<|role_start|>assistant<|role_end|>", "<|turn_end|>"),
        "<|role_start|>assistant<|role_end|>",
    ),
    form(
        "bailing",
        "",
        ("<role>SYSTEM</role>", ""),
        ("<role>HUMAN</role>", ""),
        ("<role>ASSISTANT</role>", ""),
        "<role>ASSISTANT</role>",
    ),
    form(
        "kimi-k2",
        "",
        ("<|im_system|>system<|im_middle|>", "<|im_end|>"),
        ("<|im_user|>user<|im_middle|>", "<|im_end|>"),
        ("<|im_assistant|>assistant<|im_middle|>", "<|im_end|>"),
        "<|im_assistant|>assistant<|im_middle|>",
    ),
    form(
        "seed_oss",
        "",
        ("<seed:bos>system\n", "<seed:eos>"),
        ("<seed:bos>user\n", "<seed:eos>"),
        ("<seed:bos>assistant\n", "<seed:eos>"),
        "<seed:bos>assistant\n",
    ),
    form(
        "grok-2",
        "",
        ("System: ", "<|separator|>\n\n"),
        ("Human: ", "<|separator|>\n\n"),
        ("Assistant: ", "<|separator|>\n\n"),
        "Assistant:",
    ),
    form(
        "gpt-oss",
        "",
        ("<|start|>system<|message|>", "<|end|>"),
        ("<|start|>user<|message|>", "<|end|>"),
        ("<|start|>assistant<|channel|>final<|message|>", "<|end|>"),
        "<|start|>assistant",
    ),
    form(
        "chatglm3",
        "[gMASK]sop",
        ("<|system|>\n ", ""),
        ("<|user|>\n ", ""),
        ("<|assistant|>\n ", ""),
        "<|assistant|>",
    ),
    form(
        "glmedge",
        "",
        ("<|system|>\n", ""),
        ("<|user|>\n", ""),
        ("<|assistant|>\n", ""),
        "<|assistant|>",
    ),
    form(
        "exaone-moe",
        "",
        ("<|system|>\n", "<|endofturn|>\n"),
        ("<|user|>\n", "<|endofturn|>\n"),
        ("<|assistant|>\n", "<|endofturn|>\n"),
        "<|assistant|>\n",
    ),
    form(
        "gigachat",
        "{bos}",
        ("", "<|message_sep|>"),
        (
            "user<|role_sep|>",
            "<|message_sep|>available functions<|role_sep|>[]<|message_sep|>",
        ),
        ("assistant<|role_sep|>", "<|message_sep|>"),
        "assistant<|role_sep|>",
    ),
    form(
        "yandex",
        "{bos}",
        ("", "\n\n"),
        (" Пользователь: ", "\n\n"),
        (" Ассистент: ", "\n\n"),
        " Ассистент:[SEP]",
    ),
    form(
        "bailing-think",
        "",
        ("<role>SYSTEM</role>", ""),
        ("<role>HUMAN</role>", ""),
        ("<role>ASSISTANT</role>", ""),
        "<role>ASSISTANT</role><think>",
    ),
    form(
        "bailing2",
        "",
        ("<role>SYSTEM</role>", "<|role_end|>"),
        ("<role>HUMAN</role>", "<|role_end|>"),
        ("<role>ASSISTANT</role>", "<|role_end|>"),
        "<role>ASSISTANT</role>",
    )
    .uninstructed("<role>SYSTEM</role>detailed thinking off<|role_end|>"),
    form(
        "smolvlm",
        "<|im_start|>",
        ("", "\n\n"),
        ("User: ", "<end_of_utterance>\n"),
        ("Assistant: ", "<end_of_utterance>\n"),
        "Assistant:",
    ),
    form(
        "hunyuan-moe",
        "",
        ("<|startoftext|>", "<|extra_4|>"),
        ("<|startoftext|>", "<|extra_0|>"),
        ("", "<|eos|>"),
        "",
    ),
    form(
        "hunyuan-dense",
        "{bos}",
        ("", "<｜hy_place▁holder▁no▁3｜>"),
        ("<｜hy_User｜>", ""),
        ("<｜hy_Assistant｜>", "<｜hy_place▁holder▁no▁2｜>"),
        "<｜hy_Assistant｜>",
    ),
    form(
        "hunyuan-ocr",
        "{bos}",
        ("", "<｜hy_place▁holder▁no▁3｜>"),
        ("", "<｜hy_User｜>"),
        ("", "<｜hy_Assistant｜>"),
        "",
    ),
    form("deepseek-ocr", "{bos}", ("", ""), ("", ""), ("", ""), ""),
    form(
        "pangu-embedded",
        "",
        ("[unused9]系统：", "[unused10]"),
        ("[unused9]用户：", "[unused10]"),
        ("[unused9]助手：", "[unused10]"),
        "[unused9]助手：",
    )
    .uninstructed("[unused9]系统：[unused10]"),
    form(
        "solar-open",
        "",
        ("<|begin|>system<|content|>", "<|end|>"),
        ("<|begin|>user<|content|>", "<|end|>"),
        ("<|begin|>assistant<|content|>", "<|end|>"),
        "<|begin|>assistant",
    ),
    form(
        "granite-4.0",
        "",
        (
            "<|start_of_role|>system<|end_of_role|>",
            "<|end_of_text|>\n",
        ),
        ("<|start_of_role|>user<|end_of_role|>", "<|end_of_text|>\n"),
        (
            "<|start_of_role|>assistant<|end_of_role|>",
            "<|end_of_text|>\n",
        ),
        "<|start_of_role|>assistant<|end_of_role|>",
    ),
    form(
        "mistral-v7",
        "{bos}",
        ("[SYSTEM_PROMPT] ", "[/SYSTEM_PROMPT]"),
        ("[INST] ", "[/INST]"),
        (" ", "{eos}"),
        "",
    ),
    form(
        "mistral-v7-tekken",
        "{bos}",
        ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
        ("[INST]", "[/INST]"),
        ("", "{eos}"),
        "",
    ),
];

/// In these the instructions are part of the first message of the user: what stands before that
/// message with and without instructions, before others, behind, and behind an answer.
const WITHOUT_SYSTEM: &[(&str, [&str; 6])] = &[
    (
        "gemma",
        [
            "{bos}",
            "<start_of_turn>user\n",
            "\n\n",
            "<end_of_turn>\n<start_of_turn>model\n",
            "",
            "<end_of_turn>\n",
        ],
    ),
    (
        "orion",
        [
            "{bos}",
            "Human: ",
            "\n\n",
            "\n\nAssistant: {eos}",
            "",
            "{eos}",
        ],
    ),
    (
        "llama2",
        ["{bos}", "[INST] ", "\n", " [/INST]", " ", " {eos}"],
    ),
    ("llama2-sys", LLAMA2_SYS),
    // Texts of all templates here are stripped.
    ("llama2-sys-strip", LLAMA2_SYS),
    (
        "llama2-sys-bos",
        [
            "",
            "{bos}[INST] <<SYS>>\n",
            "\n<</SYS>>\n\n",
            " [/INST]",
            " ",
            " {eos}",
        ],
    ),
    (
        "mistral-v1",
        ["{bos}", " [INST] ", "\n\n", " [/INST]", " ", "{eos}"],
    ),
    (
        "mistral-v3",
        ["{bos}", "[INST] ", "\n\n", "[/INST]", " ", "{eos}"],
    ),
    (
        "mistral-v3-tekken",
        ["{bos}", "[INST]", "\n\n", "[/INST]", "", "{eos}"],
    ),
];

const LLAMA2_SYS: [&str; 6] = [
    "{bos}",
    "[INST] <<SYS>>\n",
    "\n<</SYS>>\n\n",
    " [/INST]",
    " ",
    " {eos}",
];

/// The names of all of them.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    let forms = FORMS.iter().map(|form| form.name);
    forms.chain(WITHOUT_SYSTEM.iter().map(|(name, _)| *name))
}

/// The template of this name.
pub(super) fn template(name: &str) -> Option<String> {
    if let Some(form) = FORMS.iter().find(|form| form.name == name) {
        return Some(form.template());
    }
    let (_, texts) = WITHOUT_SYSTEM.iter().find(|(of, _)| *of == name)?;
    // Without instructions, Llama 2 has no marks for them.
    let bare = expression(&texts[1].replace("<<SYS>>\n", ""));
    let [begin, user, between, answer, before, behind] = texts.map(expression);
    Some(format!(
        "{{{{ {begin} }}}}{{%- set ns = namespace(system='') -%}}\
         {{%- for m in messages -%}}\
         {{%- if m.role == 'system' -%}}{{%- set ns.system = m.content | trim -%}}\
         {{%- elif m.role == 'assistant' -%}}{{{{ {before} ~ (m.content | trim) ~ {behind} }}}}\
         {{%- elif ns.system -%}}{{{{ {user} ~ ns.system ~ {between} ~ (m.content | trim) ~ {answer} }}}}\
         {{%- set ns.system = '' -%}}\
         {{%- else -%}}{{{{ {bare} ~ (m.content | trim) ~ {answer} }}}}\
         {{%- endif -%}}{{%- endfor -%}}"
    ))
}

impl Form {
    fn template(&self) -> String {
        let role = |(before, behind): (&str, &str)| {
            format!(
                "{{{{ {} ~ (m.content | trim) ~ {} }}}}",
                expression(before),
                expression(behind)
            )
        };
        format!(
            "{{{{ {} }}}}{{%- if messages[0].role != 'system' -%}}{{{{ {} }}}}{{%- endif -%}}\
             {{%- for m in messages -%}}\
             {{%- if m.role == 'system' -%}}{}\
             {{%- elif m.role == 'assistant' -%}}{}\
             {{%- else -%}}{}{{%- endif -%}}{{%- endfor -%}}\
             {{%- if add_generation_prompt -%}}{{{{ {} }}}}{{%- endif -%}}",
            expression(self.begin),
            expression(self.uninstructed),
            role(self.system),
            role(self.assistant),
            role(self.user),
            expression(self.answer),
        )
    }
}

/// A text as an expression of a template.
fn expression(text: &str) -> String {
    let mut parts = vec![serde_json::Value::from(text).to_string()];
    for (mark, name) in [("{bos}", "bos_token"), ("{eos}", "eos_token")] {
        parts = parts
            .iter()
            .map(|part| part.replace(mark, &format!("\" ~ {name} ~ \"")))
            .collect();
    }
    format!("({})", parts.concat())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ruvllm::chat::{ChatInputs, ChatTemplate, Message};

    fn render(name: &str, messages: &[Message]) -> String {
        let template = ChatTemplate::parse(&template(name).unwrap()).unwrap();
        let inputs = ChatInputs {
            bos_token: "<s>".into(),
            eos_token: "</s>".into(),
            ..ChatInputs::new(messages)
        };
        template.render(&inputs).unwrap()
    }

    #[test]
    fn every_name_has_a_template_that_shows_each_message() {
        let messages = [
            Message::system("SYS"),
            Message::user("ONE"),
            Message::assistant("TWO"),
            Message::user("THREE"),
        ];
        let mut n = 0;
        for name in names() {
            let text = render(name, &messages);
            let at = ["SYS", "ONE", "TWO", "THREE"].map(|part| text.find(part).unwrap());
            assert!(at.is_sorted(), "{name}: {text}");
            n += 1;
        }
        assert!(n >= 50);
        assert!(template("nonsense").is_none());
    }

    /// Conversations of each kind, as the pages of the models show them.
    #[test]
    fn forms_are_those_of_the_models() {
        let messages = [
            Message::system("S"),
            Message::user("U"),
            Message::assistant("A"),
            Message::user("V"),
        ];
        for (name, expected) in [
            (
                "chatml",
                "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n\
                 <|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n",
            ),
            (
                "gemma",
                "<s><start_of_turn>user\nS\n\nU<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n\
                 <start_of_turn>user\nV<end_of_turn>\n<start_of_turn>model\n",
            ),
            ("llama2", "<s>[INST] S\nU [/INST] A </s>[INST] V [/INST]"),
            (
                "llama2-sys",
                "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nU [/INST] A </s>[INST] V [/INST]",
            ),
            (
                "llama2-sys-strip",
                "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nU [/INST] A </s>[INST] V [/INST]",
            ),
            (
                "llama2-sys-bos",
                "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nU [/INST] A </s><s>[INST] V [/INST]",
            ),
            (
                "mistral-v7",
                "<s>[SYSTEM_PROMPT] S[/SYSTEM_PROMPT][INST] U[/INST] A</s>[INST] V[/INST]",
            ),
            (
                "mistral-v7-tekken",
                "<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]U[/INST]A</s>[INST]V[/INST]",
            ),
            (
                "llama3",
                "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>\
                 <|start_header_id|>user<|end_header_id|>\n\nU<|eot_id|>\
                 <|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|>\
                 <|start_header_id|>user<|end_header_id|>\n\nV<|eot_id|>\
                 <|start_header_id|>assistant<|end_header_id|>\n\n",
            ),
            (
                "orion",
                "<s>Human: S\n\nU\n\nAssistant: </s>A</s>Human: V\n\nAssistant: </s>",
            ),
            (
                "chatglm3",
                "[gMASK]sop<|system|>\n S<|user|>\n U<|assistant|>\n A<|user|>\n V<|assistant|>",
            ),
            (
                "glmedge",
                "<|system|>\nS<|user|>\nU<|assistant|>\nA<|user|>\nV<|assistant|>",
            ),
            (
                "gigachat",
                "<s>S<|message_sep|>user<|role_sep|>U<|message_sep|>available functions<|role_sep|>[]<|message_sep|>\
                 assistant<|role_sep|>A<|message_sep|>user<|role_sep|>V<|message_sep|>\
                 available functions<|role_sep|>[]<|message_sep|>assistant<|role_sep|>",
            ),
            (
                "yandex",
                "<s>S\n\n Пользователь: U\n\n Ассистент: A\n\n Пользователь: V\n\n Ассистент:[SEP]",
            ),
            (
                "bailing-think",
                "<role>SYSTEM</role>S<role>HUMAN</role>U<role>ASSISTANT</role>A<role>HUMAN</role>V\
                 <role>ASSISTANT</role><think>",
            ),
            (
                "smolvlm",
                "<|im_start|>S\n\nUser: U<end_of_utterance>\nAssistant: A<end_of_utterance>\n\
                 User: V<end_of_utterance>\nAssistant:",
            ),
            (
                "hunyuan-moe",
                "<|startoftext|>S<|extra_4|><|startoftext|>U<|extra_0|>A<|eos|><|startoftext|>V<|extra_0|>",
            ),
            (
                "hunyuan-dense",
                "<s>S<｜hy_place▁holder▁no▁3｜><｜hy_User｜>U<｜hy_Assistant｜>A<｜hy_place▁holder▁no▁2｜>\
                 <｜hy_User｜>V<｜hy_Assistant｜>",
            ),
            (
                "hunyuan-ocr",
                "<s>S<｜hy_place▁holder▁no▁3｜>U<｜hy_User｜>A<｜hy_Assistant｜>V<｜hy_User｜>",
            ),
        ] {
            assert_eq!(render(name, &messages), expected, "{name}");
        }
        // Without instructions.
        for (name, expected) in [
            ("llama2-sys", "<s>[INST] U [/INST]"),
            ("llama2-sys-bos", "<s>[INST] U [/INST]"),
            (
                "bailing2",
                "<role>SYSTEM</role>detailed thinking off<|role_end|><role>HUMAN</role>U<|role_end|>\
                 <role>ASSISTANT</role>",
            ),
            (
                "pangu-embedded",
                "[unused9]系统：[unused10][unused9]用户：U[unused10][unused9]助手：",
            ),
        ] {
            assert_eq!(render(name, &messages[1..2]), expected, "{name}");
        }
    }

    /// Where the reference data has a model's own template, a named one renders the same: with
    /// instructions, where that adds none of its own.
    #[test]
    fn named_templates_are_those_of_the_reference_data() {
        let Some(root) = std::env::var_os("RUVLLM_CONFORMANCE") else {
            return;
        };
        let system = [
            Message::system("Be brief."),
            Message::user("Hello."),
            Message::assistant("Yes?"),
            Message::user("Go on."),
        ];
        for (name, file, messages) in [
            ("chatml", "chat_templates/inline-chatml", &system[..]),
            ("chatml", "chat_templates/Qwen-Qwen2.5-7B-Instruct", &system),
            ("llama2-sys-bos", "chat_templates/inline-llama2", &system),
            ("llama3", "chat_templates/inline-llama3", &system),
            ("zephyr", "chat_templates/inline-zephyr", &system),
            ("gemma", "chat_templates/google-gemma-2-2b-it", &system[1..]),
            (
                "mistral-v3-tekken",
                "chat_templates/mistralai-Mistral-Nemo-Instruct-2407",
                &system[1..],
            ),
            (
                "granite-4.0",
                "chat_templates2/ibm-granite-granite-4.0",
                &system,
            ),
            ("kimi-k2", "chat_templates2/moonshotai-Kimi-K2", &system),
            (
                "rwkv-world",
                "chat_templates2/llama-cpp-rwkv-world",
                &system,
            ),
        ] {
            let path = std::path::Path::new(&root).join(format!("{file}.jinja"));
            let source = std::fs::read_to_string(&path).unwrap();
            let inputs = ChatInputs {
                bos_token: "<s>".into(),
                eos_token: "</s>".into(),
                ..ChatInputs::new(messages)
            };
            let expected = ChatTemplate::parse(&source)
                .unwrap()
                .render(&inputs)
                .unwrap();
            assert_eq!(render(name, messages), expected, "{name}: {file}");
        }
    }
}
