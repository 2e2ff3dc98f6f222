//! Conversations in the terminal.

use super::*;

/// A conversation in which every answer has six tokens, always the same.
fn greedy(model: &str) -> [&str; 8] {
    [
        "chat",
        "-m",
        model,
        "-n",
        "6",
        "--temp",
        "0",
        "--ignore-eos",
    ]
}

#[test]
fn chat_through_a_pipe() {
    let folder = Folder::new();
    let model = tiny(&folder);
    let flags = greedy(&model);
    let once = text(&run_with_input(&flags, b"the\n"));
    let twice = text(&run_with_input(&flags, b"the\n/clear\nthe\n"));
    assert!(!once.trim().is_empty());
    assert_eq!(twice, once.repeat(2));
    // What is kept of the conversation in the session gives the same answer as all of it anew.
    let answers = text(&run_with_input(&flags, b"the\n/regen\n/exit\nthe\n"));
    assert_eq!(answers, twice);
    // Conversations outgrow any context; the oldest turns go.
    let long = run_with_input(
        &[&flags[..], &["-c", "60"]].concat(),
        "the\n".repeat(6).as_bytes(),
    );
    assert!(text(&long).len() >= once.len());
    assert!(stderr(&long).contains("forgotten"), "{}", stderr(&long));

    tiny_model(None).write(folder.path("base.gguf")).unwrap();
    let base = run_with_input(
        &[
            "chat",
            "-m",
            &folder.name("base.gguf"),
            "-n",
            "4",
            "-s",
            "1",
        ],
        b"the\n",
    );
    text(&base);
    assert!(stderr(&base).contains("no chat template"));
}

#[test]
fn conversations_last() {
    let folder = Folder::new();
    let model = tiny(&folder);
    let state = folder.name("state");
    let within =
        |args: &[&str], input: &[u8]| fed(command(args).env("XDG_STATE_HOME", &state), input);
    let flags = [&greedy(&model)[..], &["-v"]].concat();
    let named = [&flags[..], &["--session", "trip"]].concat();
    let whole = text(&within(&flags, b"the\nthe the\n"));
    let first = within(&named, b"the\n");
    let second = within(&named, b"the the\n");
    assert_eq!(text(&first) + &text(&second), whole);
    assert!(
        stderr(&second).contains("2 messages goes on"),
        "{}",
        stderr(&second)
    );
    // What was computed is not computed again: the last answer and the new message are less than
    // all of it.
    let n_read = |out: &Output| -> usize {
        let notes = stderr(out);
        let (before, _) = notes.rsplit_once(" tokens read").unwrap();
        before.rsplit('[').next().unwrap().parse().unwrap()
    };
    let list = || parsed(&within(&["sessions", "--json"], b""));
    assert_eq!(list()[0]["messages"], json!(4));
    let saved = folder.path("state/ruvllm/sessions/trip/state.gguf");
    let n_resumed = n_read(&within(&named, b"the\n"));
    std::fs::remove_file(&saved).unwrap();
    assert!(n_resumed < n_read(&within(&named, b"the\n")));
    // A state of another precision, and one that is damaged.
    let other = within(&[&named[..], &["-ctk", "f32"]].concat(), b"the\n");
    assert!(
        stderr(&other).contains("another precision"),
        "{}",
        stderr(&other)
    );
    std::fs::write(&saved, "GGUF").unwrap();
    let damaged = within(&named, b"the\n");
    assert!(
        damaged.status.success() && stderr(&damaged).contains("computed again"),
        "{}",
        stderr(&damaged)
    );

    text(&within(&["sessions", "rename", "trip", "paris"], b""));
    assert_eq!(list()[0]["name"], json!("paris"));
    assert!(text(&within(&["sessions"], b"")).starts_with("paris "));
    for (args, part) in [
        (&["sessions", "rename", "trip", "x"][..], "no session trip"),
        (&["sessions", "rename", "paris", "paris"], "already"),
        (&["sessions", "rename", "paris", "../x"], "letters"),
        (&["sessions", "delete", "."], "letters"),
        (&[&flags[..], &["--session", "a/b"]].concat(), "letters"),
    ] {
        let out = within(args, b"");
        assert!(
            !out.status.success() && stderr(&out).contains(part),
            "{args:?}: {}",
            stderr(&out)
        );
    }
    text(&within(&["sessions", "delete", "paris"], b""));
    assert_eq!(list(), json!([]));
}

/// Lines that begin with a slash.
#[test]
fn commands_of_a_conversation() {
    let folder = Folder::new();
    let model = tiny(&folder);
    let flags = greedy(&model);
    let within = |more: &[&str], input: &str| {
        let mut call = command(&[&flags[..], more].concat());
        fed(
            call.env("XDG_STATE_HOME", folder.path("state")),
            input.as_bytes(),
        )
    };
    // What the model is told as a command is what it is told by a flag.
    let told = text(&within(&["-sys", "the the"], "the\n"));
    let plain = text(&within(&[], "the\n"));
    assert_ne!(told, plain);
    let by_command = within(&[], "/system the the\n/system\nthe\n");
    assert_eq!(text(&by_command), told);
    assert!(stderr(&by_command).contains("the the"));
    // So is a flag of sampling, and seeds give the same text again.
    let flag = text(&within(&["--temp", "1.5", "-s", "3"], "the\n"));
    let set = within(&[], "/set temp 1.5\n/set -s 3\n/set\nthe\n");
    assert_eq!(text(&set), flag);
    assert!(
        stderr(&set).contains("temp 1.5, top-k 40"),
        "{}",
        stderr(&set)
    );
    #[cfg(feature = "grammar")]
    {
        let masked = "/set regex t+\n/set json-schema {\"enum\": [1, 2]}\nthe\n";
        let flags = ["chat", "-m", &model, "--temp", "0"];
        let answer = text(&run_with_input(&flags, masked.as_bytes()));
        assert!(["1", "2"].contains(&answer.trim()), "{answer:?}");
    }
    for (input, part) in [
        ("/set warmth 1\n", "'--warmth'"),
        ("/set temp warm\n", "'warm'"),
        ("/set temp\n", "value"),
        ("/set top-p 2\n", "top_p"),
        ("/save\n", "/save NAME"),
        ("/save a/b\n", "letters"),
        ("/load nothing\n", "no conversation nothing"),
        ("/image\n", "/image FILE"),
    ] {
        let out = within(&[], input);
        assert!(
            !out.status.success() && stderr(&out).contains(part),
            "{input:?}: {}",
            stderr(&out)
        );
    }

    // A conversation that is saved later is the one that was saved from the beginning.
    let whole = text(&within(&[], "the\nthe the\nthe\n"));
    let first = text(&within(&[], "the\n/save trip\nthe the\n"));
    let again = within(&["--session", "trip"], "the\n");
    assert_eq!(first + &text(&again), whole);
    let taken = within(&[], "the\n/save trip\n");
    assert!(stderr(&taken).contains("already"), "{}", stderr(&taken));
    // Two conversations in turns.
    let turns = within(&[], "/load trip\nthe\n/save other\n/clear\nthe\n");
    let longer = text(&within(&[], "the\nthe the\nthe\nthe\n"));
    let last = longer.strip_prefix(&whole).unwrap().to_owned();
    assert_eq!(text(&turns), last + &plain);
    let stats = within(&[], "/load other\n/stats\nthe\n/stats\n");
    let notes = stderr(&stats);
    assert!(
        notes.contains("2 messages goes on") && notes.contains("no answer yet"),
        "{notes}"
    );
    assert!(notes.contains("6 written"), "{notes}");
    text(&within(&[], "/help\n"));
}
