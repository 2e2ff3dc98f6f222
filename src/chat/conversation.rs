//! Fitting a conversation to a template: most templates expect one system message at the start and
//! alternating turns, and clients send other conversations, too.
//!
//! A conversation is changed only where its template refuses it, or leaves out its instructions or
//! tools; each change is reported.

use crate::chat::tools::ToolFormat;
use crate::chat::{ChatError, ChatInputs, LocalTime};
use serde_json::{Map, Value, json};
use std::fmt;

/// Between texts that become one.
const BETWEEN: &str = "\n\n";
/// Length of the ids of calls that Mistral's templates take, letters and digits.
const SHORT_ID: usize = 9;
/// Maximum number of words of a message that are looked for in a prompt.
const MAX_WORDS: usize = 64;
/// Names under which templates read the reasoning of earlier answers.
const REASONING: [&str; 4] = ["reasoning_content", "reasoning", "thinking", "thought"];

/// A prompt, and the changes of the conversation that it needed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rendered {
    /// The prompt.
    pub text: String,
    /// The changes, in the order in which they were made.
    pub adjusted: Vec<Adjustment>,
}

/// A change that fits a conversation to its template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Adjustment {
    /// All system messages became one, at the start.
    SystemMerged,
    /// Messages of one role that followed each other became one.
    NeighboursMerged,
    /// Answers without text were put between what calls returned and the user's next message.
    AnswersInserted,
    /// The system messages became the beginning of the first message of the user.
    SystemInUser,
    /// The ids of calls became shorter, in calls and answers alike.
    IdsShortened,
    /// The arguments of calls became the text of their JSON.
    ArgumentsAsText,
    /// Tools that the template leaves out were described in the system message. If it leaves out
    /// calls, too, they became text of the assistant, and their results text of the user.
    ToolsInSystem,
    /// Descriptions and parameters that tools lack became empty ones.
    ToolsCompleted,
}

impl Adjustment {
    /// All of them, in the order in which they are made.
    const ALL: [Adjustment; 8] = [
        Self::ToolsCompleted,
        Self::ToolsInSystem,
        Self::IdsShortened,
        Self::ArgumentsAsText,
        Self::SystemMerged,
        Self::SystemInUser,
        Self::NeighboursMerged,
        Self::AnswersInserted,
    ];

    /// A name in one word.
    pub fn name(&self) -> &'static str {
        match self {
            Self::SystemMerged => "system-merged",
            Self::NeighboursMerged => "neighbours-merged",
            Self::AnswersInserted => "answers-inserted",
            Self::SystemInUser => "system-in-user",
            Self::IdsShortened => "ids-shortened",
            Self::ArgumentsAsText => "arguments-as-text",
            Self::ToolsInSystem => "tools-in-system",
            Self::ToolsCompleted => "tools-completed",
        }
    }

    /// The one with this [name](Self::name).
    pub fn by_name(name: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|adjustment| adjustment.name() == name)
    }

    /// Makes the change; whether there was anything to change.
    fn make(self, inputs: &mut ChatInputs, example: Option<&str>) -> bool {
        match self {
            Self::ToolsInSystem => return describe_tools(inputs, example),
            Self::ToolsCompleted => return complete_tools(inputs),
            _ => {}
        }
        let Value::Array(messages) = &mut inputs.messages else {
            return false;
        };
        match self {
            Self::SystemMerged => merge_system(messages),
            Self::NeighboursMerged => merge_neighbours(messages),
            Self::AnswersInserted => insert_answers(messages),
            Self::SystemInUser => system_in_user(messages),
            Self::IdsShortened => shorten_ids(messages),
            Self::ArgumentsAsText => arguments_as_text(messages),
            Self::ToolsInSystem | Self::ToolsCompleted => false,
        }
    }
}

impl fmt::Display for Adjustment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SystemMerged => "its template takes one system message: they were merged",
            Self::NeighboursMerged => {
                "its template wants roles to alternate: neighbours of a role were merged"
            }
            Self::AnswersInserted => {
                "its template wants an answer after what calls returned: empty ones were inserted"
            }
            Self::SystemInUser => {
                "its template has no system role: the text was put before the user's first message"
            }
            Self::IdsShortened => "its template takes short ids of calls: they were shortened",
            Self::ArgumentsAsText => "its template takes the arguments of calls as text",
            Self::ToolsInSystem => "its template does not show tools: the system message does",
            Self::ToolsCompleted => "its template wants every tool and parameter described",
        })
    }
}

/// Input of every template: arguments of calls as objects, reasoning under the name that the
/// template reads, and no text in a message with calls where the template recognises calls by that.
/// Templates that know no `tools` get them as the text `functions`, and the day as `datetime`.
pub(super) fn prepare(inputs: &mut ChatInputs, source: &str) {
    if contains_word(source, "functions") && !contains_word(source, "tools") {
        let tools = inputs.tools.iter().filter_map(Value::as_array).flatten();
        let functions: Value = tools
            .map(|tool| tool.get("function").unwrap_or(tool).clone())
            .collect();
        let now = inputs.now.unwrap_or_else(LocalTime::now_utc);
        let given = [
            ("functions", format!("{functions:#}")),
            // The hour would be another prompt each time.
            ("datetime", now.strftime("%Y-%m-%d")),
        ];
        for (name, text) in given {
            inputs.kwargs.entry(name).or_insert_with(|| text.into());
        }
    }
    let Value::Array(messages) = &mut inputs.messages else {
        return;
    };
    let tests = ["content'] is none", "content\"] is none", "content is none"];
    let tells_by_none = tests.iter().any(|test| source.contains(test));
    for message in messages.iter_mut().filter_map(Value::as_object_mut) {
        let text = |name: &&str| {
            message
                .get(*name)
                .filter(|v| v.as_str().is_some_and(|t| !t.is_empty()))
        };
        if let Some(reasoning) = REASONING.iter().find_map(text).cloned() {
            for name in REASONING.iter().filter(|name| reads(source, name)) {
                let is_there = message.get(*name).is_some_and(|value| !value.is_null());
                if !is_there {
                    message.insert((*name).to_owned(), reasoning.clone());
                }
            }
        }
        let has_calls = message.get("tool_calls").is_some_and(Value::is_array);
        if tells_by_none && has_calls && message.get("content").is_some_and(|text| text == "") {
            message.insert("content".to_owned(), Value::Null);
        }
        for arguments in arguments_of(message) {
            if let Some(object) = arguments.as_str().and_then(object_of) {
                *arguments = object.into();
            }
        }
    }
}

/// Whether a template reads a field of this name: `x.name`, `x['name']`, `x.get("name")`.
fn reads(source: &str, name: &str) -> bool {
    [(".", ""), ("'", "'"), ("\"", "\"")]
        .iter()
        .any(|(before, behind)| {
            let field = format!("{before}{name}{behind}");
            source.match_indices(&field).any(|(at, _)| {
                let next = source[at + field.len()..].chars().next();
                !next.is_some_and(|c| c.is_alphanumeric() || c == '_')
            })
        })
}

/// The arguments that a text gives; none if there is no text.
fn object_of(text: &str) -> Option<Map<String, Value>> {
    if text.trim().is_empty() {
        return Some(Map::new());
    }
    serde_json::from_str(text).ok()
}

/// The arguments of the calls of a message.
fn arguments_of(message: &mut Map<String, Value>) -> impl Iterator<Item = &mut Value> {
    let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
    calls.into_iter().flatten().filter_map(|call| {
        let is_wrapped = call.get("function").is_some_and(Value::is_object);
        let function = if is_wrapped {
            call.get_mut("function")?
        } else {
            call
        };
        function.get_mut("arguments")
    })
}

/// Renders a conversation with as few changes as possible. Nothing is remembered of others, so that
/// a conversation always has the same prompt.
pub(super) fn fit(
    inputs: &ChatInputs,
    format: ToolFormat,
    render: impl Fn(&ChatInputs) -> Result<String, ChatError>,
) -> Result<Rendered, ChatError> {
    let plain = render(inputs);
    match &plain {
        Ok(text) if !is_incomplete(inputs, text) => {
            return Ok(Rendered {
                text: text.clone(),
                adjusted: Vec::new(),
            });
        }
        // Changing the conversation would not help.
        Err(error) if !matches!(error, ChatError::Raised(_) | ChatError::Render { .. }) => {
            return plain.map(Rendered::of);
        }
        _ => {}
    }
    let example = example(inputs, format, &render);
    // A template that accepts the conversation, but leaves something out, needs no further changes.
    let bit = |adjustment: Adjustment| {
        let at = Adjustment::ALL.iter().position(|of| *of == adjustment);
        at.map_or(0, |at| 1 << at)
    };
    let of_what_is_left_out = bit(Adjustment::ToolsInSystem)
        | bit(Adjustment::SystemMerged)
        | bit(Adjustment::SystemInUser);
    let useful: u16 = if plain.is_ok() {
        of_what_is_left_out
    } else {
        u16::MAX
    };
    let all = 1u16..1 << Adjustment::ALL.len();
    let mut sets: Vec<u16> = all.filter(|set| set & !useful == 0).collect();
    // Few changes are better than many, and other forms of calls better than text.
    let as_text = bit(Adjustment::ToolsInSystem);
    sets.sort_by_key(|set| (set.count_ones(), set & as_text, *set));
    let mut tried: Vec<(Value, Option<Value>)> = Vec::new();
    for set in sets {
        let mut changed = inputs.clone();
        let chosen = Adjustment::ALL.into_iter().enumerate();
        let mut adjusted = Vec::new();
        for (_, adjustment) in chosen.filter(|(i, _)| set & 1 << i != 0) {
            if adjustment.make(&mut changed, example.as_deref()) {
                adjusted.push(adjustment);
            }
        }
        // A set with an ineffective change equals a smaller set.
        let form = (changed.messages.clone(), changed.tools.clone());
        if adjusted.len() < set.count_ones() as usize || tried.contains(&form) {
            continue;
        }
        match render(&changed) {
            Ok(text) if !is_incomplete(&changed, &text) => {
                return Ok(Rendered { text, adjusted });
            }
            Ok(_) | Err(ChatError::Raised(_) | ChatError::Render { .. }) => {}
            Err(error) => return Err(error),
        }
        tried.push(form);
    }
    plain.map(Rendered::of)
}

impl Rendered {
    fn of(text: String) -> Rendered {
        Rendered {
            text,
            adjusted: Vec::new(),
        }
    }
}

/// Whether a prompt lacks instructions or tools of its conversation.
fn is_incomplete(inputs: &ChatInputs, prompt: &str) -> bool {
    let messages = inputs.messages.as_array().into_iter().flatten();
    let lacks_system = messages
        .filter(|message| is_system(message))
        .filter_map(|message| message["content"].as_str())
        .any(|text| is_lost(text.trim(), prompt));
    let tools = inputs.tools.as_ref().and_then(Value::as_array);
    let lacks_tools = tools.into_iter().flatten().any(|tool| {
        let name = tool.get("function").unwrap_or(tool).get("name");
        name.and_then(Value::as_str)
            .is_some_and(|name| !contains_word(prompt, name))
    });
    lacks_system || lacks_tools
}

/// Whether a name is in a text, and not only as a part of longer ones.
fn contains_word(text: &str, name: &str) -> bool {
    let goes_on = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    text.match_indices(name).any(|(at, _)| {
        let (before, behind) = (&text[..at], &text[at + name.len()..]);
        !goes_on(before.chars().next_back()) && !goes_on(behind.chars().next())
    })
}

/// Whether a text is not in a prompt. Templates take words such as `/think` out of instructions, so
/// half of its first words are enough.
fn is_lost(text: &str, prompt: &str) -> bool {
    if prompt.contains(text) {
        return false;
    }
    let words: Vec<&str> = text.split_whitespace().take(MAX_WORDS).collect();
    let n_found = words.iter().filter(|word| prompt.contains(**word)).count();
    n_found * 2 < words.len()
}

fn role(message: &Value) -> &str {
    message["role"].as_str().unwrap_or_default()
}

fn is_system(message: &Value) -> bool {
    matches!(role(message), "system" | "developer")
}

/// Takes the system messages out; their content as one, if there is any.
fn take_system(messages: &mut Vec<Value>) -> Option<Value> {
    let mut system = Value::Null;
    messages.retain(|message| {
        if is_system(message) {
            add_content(&mut system, &message["content"]);
        }
        !is_system(message)
    });
    (!system.is_null()).then_some(system)
}

fn merge_system(messages: &mut Vec<Value>) -> bool {
    let n = messages.iter().filter(|message| is_system(message)).count();
    let is_plain = n == 0 || n == 1 && role(&messages[0]) == "system";
    if is_plain {
        return false;
    }
    if let Some(content) = take_system(messages) {
        messages.insert(0, json!({"role": "system", "content": content}));
    }
    true
}

fn system_in_user(messages: &mut Vec<Value>) -> bool {
    if !messages.iter().any(is_system) {
        return false;
    }
    let Some(mut content) = take_system(messages) else {
        return true;
    };
    match messages.iter_mut().find(|message| role(message) == "user") {
        Some(user) => {
            add_content(&mut content, &user["content"]);
            user["content"] = content;
        }
        None => messages.insert(0, json!({"role": "user", "content": content})),
    }
    true
}

fn merge_neighbours(messages: &mut Vec<Value>) -> bool {
    let n = messages.len();
    let mut merged: Vec<Value> = Vec::new();
    for message in messages.drain(..) {
        let mergeable = matches!(role(&message), "system" | "user" | "assistant");
        match merged
            .last_mut()
            .filter(|last| mergeable && role(last) == role(&message))
        {
            None => merged.push(message),
            Some(last) => {
                add_content(&mut last["content"], &message["content"]);
                if let Some(calls) = message["tool_calls"].as_array() {
                    let mut all = last["tool_calls"].as_array().cloned().unwrap_or_default();
                    all.extend(calls.iter().cloned());
                    last["tool_calls"] = all.into();
                }
            }
        }
    }
    *messages = merged;
    messages.len() < n
}

fn insert_answers(messages: &mut Vec<Value>) -> bool {
    let n = messages.len();
    let mut all: Vec<Value> = Vec::with_capacity(n);
    for message in messages.drain(..) {
        let returned = all.last().is_some_and(|last| role(last) == "tool");
        if returned && role(&message) == "user" {
            all.push(json!({"role": "assistant", "content": ""}));
        }
        all.push(message);
    }
    *messages = all;
    messages.len() > n
}

/// Adds content to content: texts, or lists of parts.
fn add_content(content: &mut Value, more: &Value) {
    let parts = |content: &Value| match content {
        Value::Array(parts) => parts.clone(),
        Value::String(text) => vec![json!({"type": "text", "text": text})],
        _ => Vec::new(),
    };
    match (&*content, more) {
        (Value::Null, more) => *content = more.clone(),
        (_, Value::Null) => {}
        (Value::String(before), Value::String(more)) => {
            let between = if before.is_empty() || more.is_empty() {
                ""
            } else {
                BETWEEN
            };
            *content = format!("{before}{between}{more}").into();
        }
        (before, more) => *content = [parts(before), parts(more)].concat().into(),
    }
}

fn shorten_ids(messages: &mut [Value]) -> bool {
    let mut changed = false;
    let mut shorten = |id: &mut Value| {
        if let Some(text) = id.as_str()
            && !(text.len() == SHORT_ID && text.bytes().all(|b| b.is_ascii_alphanumeric()))
        {
            *id = short_id(text).into();
            changed = true;
        }
    };
    for message in messages.iter_mut().filter_map(Value::as_object_mut) {
        message.get_mut("tool_call_id").map(&mut shorten);
        let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
        let ids = calls
            .into_iter()
            .flatten()
            .filter_map(|call| call.get_mut("id"));
        ids.for_each(&mut shorten);
    }
    changed
}

/// Nine letters and digits that stand for an id (FNV-1a).
fn short_id(id: &str) -> String {
    const DIGITS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
    let mut hash = id.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    (0..SHORT_ID)
        .map(|_| {
            let digit = DIGITS[(hash % 62) as usize];
            hash /= 62;
            char::from(digit)
        })
        .collect()
}

fn arguments_as_text(messages: &mut [Value]) -> bool {
    let mut changed = false;
    for message in messages.iter_mut().filter_map(Value::as_object_mut) {
        for arguments in arguments_of(message).filter(|arguments| arguments.is_object()) {
            *arguments = arguments.to_string().into();
            changed = true;
        }
    }
    changed
}

/// A call as the template writes it, if it does.
fn example(
    inputs: &ChatInputs,
    format: ToolFormat,
    render: impl Fn(&ChatInputs) -> Result<String, ChatError>,
) -> Option<String> {
    let arguments = json!({"parameter": "value"});
    let call = |arguments: Value, content: Value| {
        let function = json!({"name": "function_name", "arguments": arguments});
        let call = json!({"id": "a1b2c3d4e", "type": "function", "function": function});
        let messages = json!([
            {"role": "user", "content": "-"},
            {"role": "assistant", "content": content, "tool_calls": [call]},
        ]);
        let inputs = ChatInputs {
            messages,
            add_generation_prompt: false,
            ..inputs.clone()
        };
        let text = render(&inputs).ok()?;
        format.call_in(&text, "function_name").map(str::to_owned)
    };
    let texts = [Value::from(""), Value::Null];
    let forms = texts.into_iter().flat_map(|text| {
        let written = Value::from(arguments.to_string());
        [(arguments.clone(), text.clone()), (written, text)]
    });
    forms
        .into_iter()
        .find_map(|(arguments, text)| call(arguments, text))
}

/// Puts a description of the tools at the end of the first system message.
fn describe_tools(inputs: &mut ChatInputs, example: Option<&str>) -> bool {
    let Some(tools) = inputs.tools.as_ref().and_then(Value::as_array) else {
        return false;
    };
    let mut text = String::from("You may call these functions:\n");
    for tool in tools {
        text += &format!("{}\n", tool.get("function").unwrap_or(tool));
    }
    let generic = json!({"name": "function_name", "arguments": {"parameter": "value"}}).to_string();
    let form = example.unwrap_or(&generic);
    text += &format!("To call one, answer with its name and arguments in this form:\n{form}");
    let Value::Array(messages) = &mut inputs.messages else {
        return false;
    };
    if example.is_none() {
        messages.iter_mut().for_each(calls_as_text);
    }
    match messages.iter_mut().find(|message| is_system(message)) {
        Some(system) => add_content(&mut system["content"], &text.into()),
        None => messages.insert(0, json!({"role": "system", "content": text})),
    }
    true
}

/// Writes the calls of a message into its text, and makes what a call returned a message of the
/// user.
fn calls_as_text(message: &mut Value) {
    let calls = message
        .as_object_mut()
        .and_then(|fields| fields.remove("tool_calls"));
    for call in calls.iter().filter_map(Value::as_array).flatten() {
        let function = call.get("function").unwrap_or(call);
        let call = json!({"name": function["name"], "arguments": function["arguments"]});
        add_content(&mut message["content"], &call.to_string().into());
    }
    if role(message) == "tool" {
        let mut content = Value::from("The function returned:");
        add_content(&mut content, &message["content"]);
        *message = json!({"role": "user", "content": content});
    }
}

/// Adds empty descriptions, and parameters where there are none.
fn complete_tools(inputs: &mut ChatInputs) -> bool {
    let before = inputs.tools.clone();
    let tools = inputs.tools.as_mut().and_then(Value::as_array_mut);
    for tool in tools.into_iter().flatten() {
        let is_wrapped = tool.get("function").is_some_and(Value::is_object);
        let function = if is_wrapped {
            &mut tool["function"]
        } else {
            tool
        };
        let Some(function) = function.as_object_mut() else {
            continue;
        };
        function.entry("description").or_insert_with(|| "".into());
        let empty = || json!({"type": "object", "properties": {}});
        let parameters = function.entry("parameters").or_insert_with(empty);
        let properties = parameters
            .get_mut("properties")
            .and_then(Value::as_object_mut);
        for (_, property) in properties.into_iter().flatten() {
            if let Some(property) = property.as_object_mut() {
                property.entry("description").or_insert_with(|| "".into());
            }
        }
    }
    inputs.tools != before
}
