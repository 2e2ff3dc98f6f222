//! Chat templates: against Jinja2 itself on many small templates, and against hostile ones.

use ruvllm::chat::ChatError;
use ruvllm::chat::{ChatInputs, ChatTemplate, Message};
use serde_json::{Value, json};

fn inputs() -> ChatInputs {
    ChatInputs {
        add_generation_prompt: false,
        ..ChatInputs::new(&[Message::user("Hi")])
    }
}

fn render(template: &str) -> Result<String, ChatError> {
    ChatTemplate::parse(template)?.render(&inputs())
}

/// `chat_jinja2.json` is what Jinja2 3.1.6, set up as transformers does, made of its templates;
/// `chat_jinja2.py` wrote it.
#[test]
fn renders_as_jinja2_does() {
    let data: Value = serde_json::from_str(include_str!("../chat_jinja2.json")).unwrap();
    let inputs = ChatInputs {
        kwargs: data["variables"].as_object().unwrap().clone(),
        now: Some("2025-01-15T09:05:07".parse().unwrap()),
        ..inputs()
    };
    let mut failures = vec![];
    for case in data["cases"].as_array().unwrap() {
        let source = case["template"].as_str().unwrap();
        let got = ChatTemplate::parse(source).and_then(|t| t.render(&inputs));
        match (case["expected"].as_str(), got) {
            (Some(expected), Ok(got)) if got == expected => {}
            (None, Err(_)) => {}
            (expected, got) => failures.push(format!("{source}\n got {got:?}\nwant {expected:?}")),
        }
    }
    assert!(
        failures.is_empty(),
        "{}:\n{}",
        failures.len(),
        failures.join("\n")
    );
}

#[test]
fn undefined_and_none_are_different() {
    // Absent tools are None, absent variables undefined.
    let t = "{{ tools is defined }} {{ tools is none }} {{ documents is none }} {{ x is defined }}";
    assert_eq!(render(t).unwrap(), "True True True False");
    assert!(matches!(
        render("{{ x.y }}"),
        Err(ChatError::Render { line: 1, .. })
    ));
}

#[test]
fn generation_marks_are_silent() {
    let t = "{% for m in messages %}a{% generation %}{{ m.content }}{% endgeneration %}\n\
             {%- generation -%} b {%- endgeneration -%} c{% endfor %}";
    assert_eq!(render(t).unwrap(), "aHibc");
}

#[test]
fn errors_say_where() {
    let syntax = ChatTemplate::parse("a\n{% if %}\n{% endif %}").unwrap_err();
    assert!(
        matches!(syntax, ChatError::Syntax { line: 2, .. }),
        "{syntax:?}"
    );
    let unclosed = ChatTemplate::parse("{% for m in messages %}").unwrap_err();
    assert!(matches!(unclosed, ChatError::Syntax { .. }), "{unclosed:?}");
    let raised = render("\n{{ raise_exception('no ' ~ messages[0].role) }}");
    assert_eq!(raised, Err(ChatError::Raised("no user".into())));
    let in_macro = render("{% macro m() %}{{ raise_exception('deep') }}{% endmacro %}{{ m() }}");
    assert_eq!(in_macro, Err(ChatError::Raised("deep".into())));
    let failed = render("\n\n{{ 1 + 'a' }}");
    assert!(
        matches!(failed, Err(ChatError::Render { line: 3, .. })),
        "{failed:?}"
    );
    let method = render("{{ messages.append(1) }}");
    assert!(
        matches!(method, Err(ChatError::Render { .. })),
        "{method:?}"
    );
}

#[test]
fn broken_sources_are_typed_errors() {
    // The first is what fuzzing found: a tag that breaks off inside its marks, behind a macro.
    let sources = [
        "{% macro say(x, y='a') %}{{ x }}{% endmacro %}{{ say)'b') }}{n%g %}{{",
        "{% macro m(x, y='ä}}') -%}{{- x ~ '%}' ~ varargs | join('€') -}}{%- endmacro -%}é{{ m(1, *[2]) }}",
        "{#- ç -#}{% raw -%}{{ ñ {%- endraw %}{% for m in messages if m.role != '{%' %}{{+ m.role +}}\
         {% else %}∅{% endfor %}{{ {'k': [0, 2.0, (1,), none]}['k'][-1:] }}",
    ];
    for source in sources {
        let ends = source.char_indices().map(|(i, _)| i).chain([source.len()]);
        for end in ends {
            // Each end, cut off as it is, before one byte more of a mark and before a wide letter.
            for last in ["", "{", "%", "}", "-", "'", "é"] {
                let cut = format!("{}{last}", &source[..end]);
                if let Ok(template) = ChatTemplate::parse(&cut) {
                    let _ = template.render(&inputs());
                }
            }
        }
    }
}

#[test]
fn kwargs_reach_the_template_and_win() {
    let mut inputs = inputs();
    inputs.kwargs.insert("enable_thinking".into(), json!(false));
    inputs.kwargs.insert("bos_token".into(), json!("B"));
    let t = ChatTemplate::parse("{{ bos_token }}{{ enable_thinking }}").unwrap();
    assert_eq!(t.render(&inputs).unwrap(), "BFalse");
}

#[test]
fn a_template_renders_again_and_in_parallel() {
    let t = ChatTemplate::parse(
        "{% set ns = namespace(n=0) %}{% for m in messages %}\
        {% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    )
    .unwrap();
    std::thread::scope(|s| {
        for _ in 0..4 {
            s.spawn(|| (0..10).for_each(|_| assert_eq!(t.render(&inputs()).unwrap(), "1")));
        }
    });
}

/// The published attack walks from a string or function to Python's modules by attributes with
/// two underscores and runs a command. None of them leads anywhere here.
#[test]
fn cve_2024_34359_template_execution() {
    for attack in [
        "{% for c in [].__class__.__base__.__subclasses__() %}{{ c }}{% endfor %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ self.__init__.__globals__.__builtins__.__import__('os').popen('id').read() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{{ messages.__class__.__base__ }}",
        "{{ (messages|attr('__class__')).__mro__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{% import '/etc/passwd' as x %}",
        "{% extends '/etc/passwd' %}",
        "{{ open('/etc/passwd') }}",
    ] {
        match render(attack) {
            Err(ChatError::Render { .. } | ChatError::Syntax { .. }) => {}
            Ok(text) => assert_eq!(text, "", "{attack}"),
            other => panic!("{attack}: {other:?}"),
        }
    }
}

#[test]
fn endless_templates_end() {
    for (name, t) in [
        (
            "loops",
            "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
        ),
        (
            "sums",
            "{% for a in range(9999) %}{% for b in range(9999) %}{% set c = a + b %}{% endfor %}{% endfor %}",
        ),
    ] {
        assert!(
            matches!(render(t), Err(ChatError::OutOfSteps { .. })),
            "{name}: {:?}",
            render(t)
        );
    }
    for t in [
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% include 'chat' %}",
        "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}",
        "{% for x in [[[]]] recursive %}{{ loop([[[]]]) }}{% endfor %}",
        "{{ 'x' * 1000000000000 }}",
        "{{ range(1000000000) | list }}",
        "{{ 'a' | indent(1000000000000) }}",
        "{{ [] | batch(100000000000) }}",
        "{{ [] | slice(100000000000) }}",
        "{{ '{:>1000000000000}'.format('a') }}",
        "{{ '{:.99999999999999999999f}'.format(1.0) }}",
        "{{ '%1000000000000d' | format(1) }}",
        "{{ ('{0}' * 1000).format('x' * 10000000) }}",
        "{{ 'a'.ljust(67000000, 'x' * 100000000) }}",
    ] {
        assert!(
            matches!(render(t), Err(ChatError::Render { .. })),
            "{t}: {:?}",
            render(t).map(|s| s.len())
        );
    }
}

#[test]
fn long_outputs_end() {
    let t = "{% set s = 'x' * 1000000 %}{% for i in range(100000) %}{{ s }}{% endfor %}";
    assert!(matches!(render(t), Err(ChatError::OutputTooLong { .. })));
    let t = "{{ ('x' * 100000) | replace('x', 'y' * 100000) }}";
    assert!(matches!(render(t), Err(ChatError::Render { .. })));
    let long = ChatTemplate::parse(&" ".repeat((256 << 10) + 1));
    assert!(matches!(long, Err(ChatError::TooLong { .. })));
}

#[test]
fn deep_values_and_sources_do_not_overflow_the_stack() {
    let t = "{% set ns = namespace(v=[]) %}{% for i in range(99999) %}{% set ns.v = [ns.v] %}\
             {% endfor %}";
    assert_eq!(render(t).unwrap(), "");
    for print in ["{{ ns.v }}", "{{ ns.v | tojson }}"] {
        assert!(matches!(
            render(&format!("{t}{print}")),
            Err(ChatError::Render { .. })
        ));
    }
    // As deep as the longest accepted source allows.
    for (open, middle, close) in [
        ("(", "1", ")"),
        ("[", "1", "]"),
        ("not ", "1", ""),
        ("-", "1", ""),
        ("1+", "1", ""),
        ("1~", "1", ""),
        ("", "x", ".a"),
        ("", "x", "|d"),
        ("", "x", "[1]"),
        ("", "x", "()"),
        ("1 if 1 else ", "1", ""),
        ("1 or ", "1", ""),
        ("1<", "1", ""),
        ("", "{% if 1 %}", "{% elif 1 %}"),
        ("", "{% if 1 %}", "{% else %}{% if 1 %}"),
    ] {
        let n = (255 << 10) / (open.len() + close.len());
        let body = format!("{}{middle}{}", open.repeat(n), close.repeat(n));
        let source = if middle == "{% if 1 %}" {
            body + "{% endif %}"
        } else {
            format!("{{{{ {body} }}}}")
        };
        _ = ChatTemplate::parse(&source).and_then(|t| t.render(&inputs()));
    }
    let source = "{% if true %}".repeat(10_000) + &"{% endif %}".repeat(10_000);
    assert!(matches!(
        ChatTemplate::parse(&source),
        Err(ChatError::Syntax { .. })
    ));
}

/// Templates of some hundred bytes that would take all memory, and go on for ever after that.
fn greedy() -> Vec<(&'static str, String)> {
    let again = |n: usize, begin: &str, step: &str| begin.to_owned() + &step.repeat(n);
    let long = "{% set s = 'x' * 1000000 %}{% set l = [] %}{% for i in range(99999) %}";
    let each = |body: &str| format!("{long}{body}{{% endfor %}}");
    vec![
        (
            "concatenated",
            again(40, "{% set a = 'ab' %}", "{% set a = a ~ a %}"),
        ),
        (
            "added",
            again(40, "{% set a = 'ab' %}", "{% set a = a + a %}"),
        ),
        (
            "lists",
            again(40, "{% set a = [1] %}", "{% set a = a + a %}"),
        ),
        (
            "repeated",
            again(12, "{% set a = [1] %}", "{% set a = a * 99 %}"),
        ),
        (
            "captured",
            again(
                40,
                "{% set a = 'ab' %}",
                "{% set a %}{{ a }}{{ a }}{% endset %}",
            ),
        ),
        (
            "macros",
            "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% else %}xxxxxxxxxx{% endif %}\
             {% endmacro %}{% set a = m(90) %}"
                .to_owned(),
        ),
        (
            "printed",
            again(60, "{% set a = ['ab'] %}", "{% set a = [a, a] %}") + "{{ a }}",
        ),
        (
            "as JSON",
            again(60, "{% set a = ['ab'] %}", "{% set a = [a, a] %}") + "{{ a | tojson }}",
        ),
        ("kept", each("{% set _ = l.append(s ~ i) %}")),
        ("kept letters", each("{% set _ = l.append(s | list) %}")),
        ("kept parts", each("{% set _ = l.append(s.split('x')) %}")),
        (
            "kept lines",
            each("{% set _ = l.append((s | replace('x', '\\n')).splitlines()) %}"),
        ),
        (
            "kept numbers",
            each("{% set _ = l.append(range(99999) | map('string') | list) %}"),
        ),
        (
            "kept sorted",
            each("{% set _ = l.append(range(99999) | sort) %}"),
        ),
        ("kept batches", each("{% set _ = l.append(s | batch(2)) %}")),
        (
            "kept formats",
            each("{% set _ = l.append('%9999999d' % i) %}"),
        ),
        (
            "kept padding",
            each("{% set _ = l.append('a'.center(1000000)) %}"),
        ),
        ("kept joined", each("{% set _ = l.append([s] | join) %}")),
        ("kept upper", each("{% set _ = l.append(s.upper()) %}")),
        ("kept slices", each("{% set _ = l.append(s[1:]) %}")),
        (
            "text of its own",
            format!(
                "{{% set a %}}{{% for i in range(99999) %}}{{% for j in range(99) %}}{}{{% endfor %}}{{% endfor %}}{{% endset %}}",
                "text ".repeat(40_000)
            ),
        ),
        (
            "raw text of its own",
            format!(
                "{{% set a %}}{{% for i in range(99999) %}}{{% raw %}}{}{{% endraw %}}{{% endfor %}}{{% endset %}}",
                "text ".repeat(40_000)
            ),
        ),
        (
            "white space of its own",
            format!(
                "{{% set a %}}{{% for i in range(99999) %}}{}{{% endfor %}}{{% endset %}}",
                " ".repeat(200_000)
            ),
        ),
    ]
}

/// Memory is limited, and the process goes on: by a limit of its own for a child that renders
/// these.
#[test]
#[cfg(unix)]
fn greedy_templates_end_in_bounded_memory() {
    const CHILD: &str = "RUVLLM_RENDER_GREEDY";
    if std::env::var_os(CHILD).is_some() {
        for (name, template) in greedy() {
            let outcome = ChatTemplate::parse(&template).and_then(|mut t| {
                // As long as the limit itself takes, less time.
                t.set_max_memory(64 << 20);
                t.render(&inputs())
            });
            let error = outcome.map(|text| text.len()).expect_err(name);
            let is_typed = matches!(
                error,
                ChatError::OutOfMemory { .. }
                    | ChatError::OutOfSteps { .. }
                    | ChatError::OutOfTime { .. }
                    | ChatError::Render { .. }
                    | ChatError::Syntax { .. }
            );
            assert!(is_typed, "{name}: {error:?}");
        }
        eprintln!("{} templates ended", greedy().len());
        return;
    }
    let exe = std::env::current_exe().unwrap();
    // 2 GiB of addresses, of which a rendering reserves 256 MiB for its stack.
    let script =
        "ulimit -v 2097152 && exec \"$0\" greedy_templates_end_in_bounded_memory --nocapture";
    let child = std::process::Command::new("sh")
        .args(["-c", script])
        .arg(exe)
        .env(CHILD, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success(), "{}: {text}", child.status);
    assert!(text.contains("templates ended"), "{text}");
}

#[test]
fn lists_of_a_template_grow_and_contain_no_circle() {
    let t = "{% set l = [] %}{% set m = [l] %}{% set _ = l.append(m) %}";
    assert!(matches!(render(t), Err(ChatError::Render { .. })));
    let t = "{% set l = [] %}{% set ns = namespace(l=l) %}{% set _ = l.append(ns) %}";
    assert!(matches!(render(t), Err(ChatError::Render { .. })));
    let t = "{% set l = [] %}{% set _ = l.append(messages) %}{{ l[0][0].role }}";
    assert_eq!(render(t).unwrap(), "user");
}

#[test]
fn the_names_of_operators_are_not_a_templates() {
    for t in [
        "{{ __op_text(1) }}",
        "{% set __op_add = 1 %}",
        "{% for __op_mul in [] %}{% endfor %}",
        "{% macro __op_list() %}{% endmacro %}",
    ] {
        let error = ChatTemplate::parse(t).unwrap_err();
        assert!(matches!(error, ChatError::Syntax { .. }), "{t}: {error:?}");
    }
}
