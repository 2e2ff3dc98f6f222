//! Templates that never end, in a process of their own: the threads that are left behind keep cores
//! busy until it ends.
#![cfg(feature = "chat")]

use ruvllm::chat::ChatError;
use ruvllm::chat::{ChatInputs, ChatTemplate, Message};
use std::time::{Duration, Instant};

/// The engine compares lists for ever; the caller goes on all the same.
#[test]
fn comparing_shared_lists_ends_in_time() {
    let t = "{% set ns = namespace(s=[1], t=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}\
             {% set ns.t = [ns.t, ns.t] %}{% endfor %}{{ ns.s == ns.t }}";
    let mut template = ChatTemplate::parse(t).unwrap();
    let inputs = ChatInputs::new(&[Message::user("Hi")]);
    assert_eq!(
        template.render_unless(&inputs, || true),
        Err(ChatError::Cancelled)
    );
    // The usual limit takes ten seconds to reach.
    let (mut limit, mut text) = (Duration::from_secs(10), "10s");
    if std::env::var_os("RUVLLM_LONG").is_none() {
        (limit, text) = (Duration::from_millis(500), "500ms");
        template.set_max_time(limit);
    }
    let begun = Instant::now();
    let error = template.render(&inputs).unwrap_err();
    assert_eq!(error, ChatError::OutOfTime { limit });
    assert_eq!(
        error.to_string(),
        format!("the chat template did not end within {text}")
    );
    assert!(begun.elapsed() >= limit);
}
