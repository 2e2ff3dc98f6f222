//! What was taught: `ruvllm memory`, and the measurement of behaviour.

use super::*;

#[test]
fn a_memory_is_seen_changed_and_forgotten() {
    let folder = Folder::new();
    let mine = folder.name("mine");
    let memory = |args: &[&str]| run(&[&["memory"], args].concat());
    let list = || parsed(&memory(&["list", &mine, "--json"]));
    fails(&["memory", "list", &mine], 1, &["no folder", "memory add"]);
    let gauge = "The gauge at Ossen Weir is read by Talvo Renning.";
    for text in [gauge, "The door code of the Vintal Archive is 4821."] {
        stdout(&memory(&["add", &mine, text]));
    }
    let by = "The gauge at Ossen Weir is read by Mirela Ostrand now.";
    let added = memory(&["add", &mine, by, "--correction", "--session", "trip"]);
    assert!(
        stderr(&added).contains("entry 3 corrects entry 1"),
        "{}",
        stderr(&added)
    );

    let all = list();
    assert_eq!(all[0]["text"], gauge);
    assert_eq!(
        (&all[0]["corrected_by"], &all[2]["corrects"]),
        (&json!(3), &json!(1))
    );
    let found = text(&memory(&[
        "search",
        &mine,
        "Who reads the gauge at Ossen Weir?",
    ]));
    assert!(
        found.contains("Mirela") && !found.contains("Talvo"),
        "{found}"
    );

    text(&memory(&[
        "edit",
        &mine,
        "2",
        "The door code is 9917.",
        "--verdict",
        "partial",
    ]));
    let entry = &list()[1];
    assert_eq!(
        (&entry["text"], &entry["verdict"]),
        (&json!("The door code is 9917."), &json!("partial"))
    );
    let out = folder.name("memory.jsonl");
    text(&memory(&["export", &mine, "-o", &out]));
    let lines = std::fs::read_to_string(&out).unwrap();
    assert_eq!(lines, text(&memory(&["export", &mine])));
    assert_eq!(lines.lines().count(), 3);
    fails(
        &["memory", "export", &mine, "-o", &out],
        1,
        &["memory.jsonl"],
    );

    // Questions are of what is right, a line each that `train` reads.
    let out = folder.name("questions.jsonl");
    text(&memory(&["questions", &mine, "-n", "1", "-o", &out]));
    let pairs = std::fs::read_to_string(&out).unwrap();
    assert!(pairs.contains(by) && !pairs.contains(gauge), "{pairs}");
    assert!(!pairs.contains("9917"), "{pairs}");
    let adapter = folder.name("adapter.gguf");
    let train = ["train", "-f", &out, "-o", &adapter, "--epochs", "1"];
    text(&run(&[&train[..], &["--held-out", "0"]].concat()));
    fails(
        &["memory", "questions", &mine, "-o", &out],
        1,
        &["questions.jsonl"],
    );

    // What this model is too small to learn takes no effect.
    let control = folder.name("control.txt");
    std::fs::write(&control, include_str!("../../../models/demo-heldout.txt")).unwrap();
    let mut asked = vec!["consolidate", &mine, "--control", &control];
    asked.extend(["-n", "1", "--epochs", "1", "--json"]);
    let refused = memory(&asked);
    let report = String::from_utf8_lossy(&refused.stdout).into_owned();
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    assert_eq!(
        (&report["n_entries"], &report["version"]),
        (&json!(1), &json!(null))
    );
    assert!(
        stderr(&refused).contains("no adapter takes effect"),
        "{}",
        stderr(&refused)
    );
    let status = parsed(&run(&["learn", "status", &mine, "--json"]));
    let of = |name: &str| &status["memory"][name];
    assert_eq!(
        (of("entries"), of("new"), of("version")),
        (&json!(3), &json!(0), &json!(null))
    );
    let status = text(&run(&["learn", "status", &mine]));
    assert!(status.contains("memory     3 entries"), "{status}");
    fails(&["memory", "roll-back", &mine], 1, &["memory consolidate"]);
    fails(&["memory", "consolidate", &mine], 2, &["--control"]);

    text(&memory(&["forget", &mine, "--session", "trip"]));
    text(&memory(&["forget", &mine, "2"]));
    assert_eq!(
        (list().as_array().unwrap().len(), &list()[0]["corrected_by"]),
        (1, &json!(null))
    );
    fails(
        &["memory", "forget", &mine, "2"],
        1,
        &["no entry 2", "memory list"],
    );
    fails(&["memory", "forget", &mine], 2, &["NUMBERS"]);
    fails(&["memory", "add", &mine, "..."], 1, &["no letter or digit"]);
    fails(
        &["memory", "edit", &mine, "1", "x", "--verdict", "fine"],
        2,
        &["success, partial, failure"],
    );
}

/// `chat --memory`: what one conversation remembers is told to another, before what is like it.
#[test]
fn conversations_are_told_what_is_remembered() {
    let folder = Folder::new();
    let (mine, state) = (folder.name("mine"), folder.name("state"));
    let flags = ["chat", "-n", "2", "--temp", "0", "--memory", &mine];
    let within = |more: &[&str], input: &str| {
        let args = [&flags[..], more].concat();
        fed(
            command(&args).env("XDG_STATE_HOME", &state),
            input.as_bytes(),
        )
    };
    let gauge = "The gauge at Ossen Weir is read by Talvo Renning.";
    let first = within(
        &[],
        &format!("/remember {gauge}\nthe\n/remember\n/memory\n"),
    );
    let told = stderr(&first);
    assert!(told.contains("entry 1") && told.contains(gauge), "{told}");
    assert!(told.contains("2 success the"), "{told}");
    text(&first);

    let question = "Who reads the gauge at Ossen Weir?";
    text(&within(&["--session", "told"], &format!("{question}\n")));
    text(&within(
        &["--session", "other"],
        "What is a borrow checker?\n",
    ));
    let said = |name: &str| {
        let file = format!("state/ruvllm/sessions/{name}/messages.json");
        std::fs::read_to_string(folder.path(&file)).unwrap()
    };
    let notes = "Notes from earlier conversations";
    let conversation = said("told");
    let (before, after) = conversation.split_once(gauge).expect("it is told");
    assert!(
        before.contains(notes) && after.contains(question),
        "{conversation}"
    );
    assert!(!said("other").contains(notes));

    let by = "/correct The gauge at Ossen Weir is read by Mirela Ostrand now.";
    let corrected = within(&[], &format!("{by}\n/forget 2\n/forget 3\n"));
    assert!(stderr(&corrected).contains("entry 3 corrects entry 1"));
    assert_eq!(text(&run(&["memory", "list", &mine])).lines().count(), 1);
    assert_eq!(within(&[], "/forget 9\n").status.code(), Some(1));
    let without = run_with_input(&flags[..5], b"/remember a fact\n");
    assert!(
        stderr(&without).contains("--memory"),
        "{}",
        stderr(&without)
    );
}

#[test]
fn behaviour_is_measured() {
    let control = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo-heldout.txt");
    let bench = ["bench", "learning", "--behaviour", "--control", control];
    let args = ["--facts", "16", "--arms", "nothing", "--json"];
    let report = parsed(&run(&[&bench[..], &args].concat()));
    let arm = &report["arms"][0];
    assert_eq!(
        (&report["n_facts"], &arm["arm"]),
        (&json!(16), &json!("nothing"))
    );
    assert_eq!(arm["scores"]["paraphrase"]["chosen"]["n"], 16);
    assert_eq!(arm["scores"]["recall"]["said"]["right"], 0);
    assert_eq!(arm["locality"]["value"], 1.0);

    let wrong =
        |args: &[&str], code, parts: &[&str]| fails(&[&bench[..], args].concat(), code, parts);
    wrong(&["--facts", "3"], 1, &["n_facts is 3", "16 to 700"]);
    wrong(
        &["--arms", "everything"],
        2,
        &["nothing, context, retrieval"],
    );
    wrong(&["-f", control], 2, &["--behaviour"]);
    fails(
        &["bench", "learning", "--facts", "16", "--control", control],
        2,
        &["--behaviour"],
    );
}
