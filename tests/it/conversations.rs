//! Conversations that a template does not take as they are.

use ruvllm::chat::ChatError;
use ruvllm::chat::{Adjustment, ChatInputs, ChatTemplate, Message, Rendered};
use serde_json::{Value, json};

fn fit(template: &str, messages: Value) -> Result<Rendered, ChatError> {
    let inputs = ChatInputs {
        messages,
        ..ChatInputs::new(&[])
    };
    ChatTemplate::parse(template)?.render_fitted(&inputs)
}

const SHOW: &str = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}";

#[test]
fn what_a_template_takes_is_not_changed() {
    let messages = json!([
        {"role": "system", "content": "a"},
        {"role": "system", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "user", "content": "d"},
    ]);
    let rendered = fit(SHOW, messages).unwrap();
    assert_eq!(rendered.text, "[system:a][system:b][user:c][user:d]");
    assert_eq!(rendered.adjusted, []);
}

#[test]
fn a_template_with_one_system_message_gets_one() {
    let refuses = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}\
                   {{ raise_exception('first') }}{% endif %}[{{ m.role }}:{{ m.content }}]{% endfor %}";
    // Leaves the others out without a word.
    let forgets = "{% if messages[0].role == 'system' %}[system:{{ messages[0].content }}]{% endif %}\
                   {% for m in messages %}{% if m.role == 'user' %}[user:{{ m.content }}]{% endif %}{% endfor %}";
    let messages = json!([
        {"role": "system", "content": "a"},
        {"role": "user", "content": "c"},
        {"role": "system", "content": [{"type": "text", "text": "b"}]},
        {"role": "user", "content": "d"},
    ]);
    let rendered = fit(refuses, messages).unwrap();
    assert_eq!(rendered.adjusted, [Adjustment::SystemMerged]);
    let messages = json!([
        {"role": "developer", "content": "a"},
        {"role": "developer", "content": "b"},
        {"role": "user", "content": "c"},
    ]);
    for template in [refuses, forgets] {
        let template = template.replace("'system' and", "'developer' or m.role == 'system' and");
        let rendered = fit(&template, messages.clone()).unwrap();
        assert_eq!(rendered.text, "[system:a\n\nb][user:c]");
        assert_eq!(rendered.adjusted, [Adjustment::SystemMerged]);
    }
}

#[test]
fn roles_alternate_where_they_have_to() {
    let template = "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
                    {{ raise_exception('alternate') }}{% endif %}[{{ m.role }}:{{ m.content }}]{% endfor %}";
    let messages = json!([
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "d"},
    ]);
    let rendered = fit(template, messages).unwrap();
    assert_eq!(rendered.text, "[user:s\n\na\n\nb][assistant:c][user:d]");
    let changes = [Adjustment::SystemInUser, Adjustment::NeighboursMerged];
    assert_eq!(rendered.adjusted, changes);
    // What cannot be mended is told in the template's words.
    let refused = fit(
        "{{ raise_exception('never') }}",
        json!([{"role": "user", "content": "x"}]),
    );
    assert_eq!(refused, Err(ChatError::Raised("never".into())));
}

#[test]
fn ids_and_arguments_have_the_form_of_the_template() {
    let template = "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}\
                    {% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}\
                    [{{ c.id }}:{{ c.function.arguments | tojson }}]{% endfor %}\
                    {% elif m.role == 'tool' %}\
                    {% if m.tool_call_id | length != 9 %}{{ raise_exception('nine') }}{% endif %}\
                    [{{ m.tool_call_id }}={{ m.content }}]{% endif %}{% endfor %}";
    let call = |id: &str, arguments: &str| {
        json!([
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": null, "tool_calls": [
                {"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}}
            ]},
            {"role": "tool", "tool_call_id": id, "content": "7"},
        ])
    };
    let rendered = fit(template, call("abcDEF123", "{\"n\": 1}")).unwrap();
    assert_eq!(rendered.text, "[abcDEF123:{\"n\": 1}][abcDEF123=7]");
    let rendered = fit(template, call("call_2feee8b5c1532da2", "")).unwrap();
    assert_eq!(rendered.adjusted, [Adjustment::IdsShortened]);
    let id = &rendered.text[1..10];
    assert_eq!(rendered.text, format!("[{id}:{{}}][{id}=7]"));
    assert!(id.bytes().all(|b| b.is_ascii_alphanumeric()));
    let text = "{% for m in messages %}{% for c in m.tool_calls or [] %}\
                {{ 'arguments: ' + c.function.arguments }}{% endfor %}{% endfor %}";
    let rendered = fit(text, call("a", "{\"n\": 1}")).unwrap();
    assert_eq!(rendered.text, "arguments: {\"n\":1}");
    assert_eq!(rendered.adjusted, [Adjustment::ArgumentsAsText]);
}

#[test]
fn reasoning_has_the_name_that_the_template_reads() {
    for name in ["reasoning_content", "reasoning", "thinking", "thought"] {
        let messages = json!([{"role": "assistant", "content": "c", "reasoning_content": "R"}]);
        for read in [
            format!("m.{name}"),
            format!("m['{name}']"),
            format!("m.get(\"{name}\")"),
        ] {
            let template = format!("{{% for m in messages %}}{{{{ {read} }}}}{{% endfor %}}");
            assert_eq!(
                fit(&template, messages.clone()).unwrap().text,
                "R",
                "{read}"
            );
        }
    }
    // A template that reads none sees the message as it is.
    let template = "{% for m in messages %}{{ m | tojson }}{% endfor %}";
    let text = fit(template, json!([{"role": "assistant", "thinking": "R"}]))
        .unwrap()
        .text;
    assert_eq!(text, "{\"role\": \"assistant\", \"thinking\": \"R\"}");
}

#[test]
fn tools_that_a_template_does_not_show_are_in_the_system_message() {
    let with_tools = |template: &str| {
        let inputs = ChatInputs {
            messages: json!([{"role": "user", "content": "x"}]),
            tools: Some(json!([{"type": "function", "function": {"name": "get_weather"}}])),
            ..ChatInputs::new(&[])
        };
        let template = ChatTemplate::parse(template).unwrap();
        template.render_fitted(&inputs).unwrap()
    };
    let rendered = with_tools(SHOW);
    assert_eq!(rendered.adjusted, [Adjustment::ToolsInSystem]);
    assert!(
        rendered.text.contains("{\"name\":\"get_weather\"}"),
        "{rendered:?}"
    );
    // In the form that the template has for calls.
    let calls = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% for c in m.tool_calls or [] %}\
                 <tool_call>\n{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}\n</tool_call>\
                 {% endfor %}{% endfor %}";
    let rendered = with_tools(calls);
    assert!(
        rendered
            .text
            .contains("<tool_call>\n{\"name\": \"function_name\""),
        "{rendered:?}"
    );
    assert_eq!(with_tools("{{ tools | tojson }}").adjusted, []);
    // One that adds the description to a text.
    let described =
        "{% for t in tools %}{{ t.function.name + ': ' + t.function.description }}{% endfor %}";
    let rendered = with_tools(described);
    assert_eq!(rendered.adjusted, [Adjustment::ToolsCompleted]);
    assert_eq!(rendered.text, "get_weather: ");
}

/// Where a template knows neither tools nor calls, a conversation with both is text.
#[test]
fn calls_that_a_template_does_not_show_are_text() {
    let template = "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
                    {{ raise_exception('alternate') }}{% endif %}[{{ m.role }}:{{ m.content }}]{% endfor %}";
    let inputs = ChatInputs {
        messages: json!([
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{\"n\": 1}"}}
            ]},
            {"role": "tool", "tool_call_id": "a", "content": "7"},
        ]),
        tools: Some(json!([{"type": "function", "function": {"name": "f"}}])),
        ..ChatInputs::new(&[])
    };
    let rendered = ChatTemplate::parse(template)
        .unwrap()
        .render_fitted(&inputs)
        .unwrap();
    let changes = [Adjustment::ToolsInSystem, Adjustment::SystemInUser];
    assert_eq!(rendered.adjusted, changes);
    let end =
        "[assistant:{\"name\":\"f\",\"arguments\":{\"n\":1}}][user:The function returned:\n\n7]";
    assert!(rendered.text.ends_with(end), "{}", rendered.text);
}

/// Mistral Nemo counts turns without calls and what they returned.
#[test]
fn an_answer_stands_between_what_a_call_returned_and_the_user() {
    let template = "{% set ns = namespace(n=0) %}{% for m in messages %}\
                    {% if m.role != 'tool' and not m.tool_calls %}\
                    {% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}\
                    {% set ns.n = ns.n + 1 %}{% endif %}[{{ m.role }}:{{ m.content }}]{% endfor %}";
    let call = json!({"id": "abcdefgh1", "type": "function", "function": {"name": "f", "arguments": "{}"}});
    let messages = json!([
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "b", "tool_call_id": "abcdefgh1"},
        {"role": "user", "content": "c"},
    ]);
    let rendered = fit(template, messages).unwrap();
    assert_eq!(rendered.adjusted, [Adjustment::AnswersInserted]);
    assert_eq!(
        rendered.text,
        "[user:a][assistant:][tool:b][assistant:][user:c]"
    );
}

/// As Firefunction v2 has them: tools as a text, and the day.
#[test]
fn templates_that_know_functions_get_them() {
    let template = "{{ functions }} on {{ datetime }}: {{ messages[0].content }}";
    let inputs = ChatInputs {
        tools: Some(json!([{"type": "function", "function": {"name": "f", "parameters": {}}}])),
        now: "2025-01-15T09:05:07".parse().ok(),
        ..ChatInputs::new(&[Message::user("hi")])
    };
    assert!(inputs.now.is_some());
    let rendered = ChatTemplate::parse(template)
        .unwrap()
        .render_fitted(&inputs);
    let rendered = rendered.unwrap();
    assert_eq!(
        rendered.text,
        "[\n  {\n    \"name\": \"f\",\n    \"parameters\": {}\n  }\n] on 2025-01-15: hi"
    );
    assert_eq!(rendered.adjusted, []);
    let bare = ChatInputs {
        tools: None,
        ..inputs
    };
    let rendered = ChatTemplate::parse(template).unwrap().render_fitted(&bare);
    assert_eq!(rendered.unwrap().text, "[] on 2025-01-15: hi");
}
