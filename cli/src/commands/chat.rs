//! `ruvllm chat`: a conversation in the terminal.
//!
//! Each turn renders the whole conversation with the model's template and tokenises it. What the
//! session has already computed of these tokens is kept, the rest computed, so that a template may
//! rewrite earlier turns as it likes (some drop old reasoning).

use crate::flags::template::{
    ImageTemplate, Pictures, Renderer, TemplateArgs, bos_text, eos_text, parts, transcript_note,
};
use crate::flags::{
    Drafted, ImageArgs, Learning, MemoryArgs, ModelArgs, PlacementArgs, SamplingArgs, TextArgs,
    entry_line, keep_for, no_tokenizer, notes, read, remember, session, speculate, tell_failure,
};
use crate::io::conversations::{Kept, SessionName};
use crate::io::lines::Lines;
use crate::io::slash::{COMMANDS, Command};
use crate::io::{
    Failure, note, on_interrupt, paint, per_second, picture, print, printable, read_text,
    stdin_is_terminal, unix_time, without_last_newline,
};
use rustyline::error::ReadlineError;
use ruvllm::CancelToken;
use ruvllm::Model;
use ruvllm::Sampler;
use ruvllm::Session;
use ruvllm::StopReason;
use ruvllm::Tokenizer;
use ruvllm::arch::KV_BLOCK;
use ruvllm::chat::{Adjustment, ChatInputs, Message};
use ruvllm::decode::{DecodeError, Speculation};
use ruvllm::session::{EncodedPrompt, PartsError};
use ruvllm::{Error, SessionError};
use ruvllm_learn::Learning as _;
use ruvllm_learn::memory::{Memory, NewEntry};
use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::time::Instant;

const EXAMPLES: &str = "\
Examples:
  ruvllm chat -m model.gguf
  ruvllm chat -m model.gguf -sys \"You answer in one sentence.\" --temp 0.6
  echo \"What is the capital of France?\" | ruvllm chat -m model.gguf
  ruvllm chat -m model.gguf --session trip    go on with it another day
  ruvllm chat -m model.gguf --image cat.png   talk about a picture; /image FILE adds another
  ruvllm chat -m model.gguf --learn mine      learn from it; `ruvllm learn` shows and undoes
  ruvllm chat -m model.gguf --memory mine     /remember facts, which later conversations are told

In a conversation: Ctrl-C stops an answer, Ctrl-D leaves. A line that ends in \\ goes on in the \
next. /help tells the commands.";

const KEPT_AS_TEXT: &str = "images do not go with --session: a conversation is kept as text";

#[derive(clap::Args)]
#[command(
    after_help = EXAMPLES,
    mut_arg("n_predict", |arg| arg.help("Maximum number of tokens of an answer (-1 or -2: until the context is full)")),
    mut_arg("reverse_prompt", |arg| arg.help("End an answer before this text appears; repeatable")),
    mut_arg("verbose", |arg| arg.help("Show timings after each answer")),
)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// First message
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,
    /// How the model is to behave [short: -sys]
    #[arg(
        long,
        value_name = "TEXT",
        conflicts_with = "system_prompt_file",
        allow_hyphen_values = true
    )]
    system_prompt: Option<String>,
    /// The same, from a file [short: -sysf]
    #[arg(long, value_name = "FILE")]
    system_prompt_file: Option<PathBuf>,
    /// Keep the conversation under this name, and go on with it (`ruvllm sessions` lists them)
    #[arg(long, value_name = "NAME")]
    session: Option<SessionName>,
    #[command(flatten)]
    placement: PlacementArgs,
    #[command(flatten)]
    template: TemplateArgs,
    #[command(flatten)]
    images: ImageArgs,
    #[command(flatten)]
    text: TextArgs,
    #[command(flatten)]
    memory: MemoryArgs,
}

/// What records of the conversation are called: its name, or when it began.
fn session_id(args: &Args) -> String {
    let name = args.session.as_ref();
    name.map_or_else(|| format!("chat-{}", unix_time()), SessionName::to_string)
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let system = match (&args.system_prompt, &args.system_prompt_file) {
        (Some(text), _) => Some(text.clone()),
        (None, Some(path)) => Some(without_last_newline(read_text(path)?)),
        (None, None) => None,
    };
    let model = args.model.open(&args.placement)?;
    let options = args.text.options(&model);
    let tokenizer = model.tokenizer().ok_or_else(|| no_tokenizer(&args.model))?;
    let sampler = args.text.sampling.sampler(&model, tokenizer)?;
    let (template, stop) = template(args, &model)?;
    let mut session = session(&model, &args.text.session, &options, 1)?;
    let (kept, messages) = match &args.session {
        Some(name) => Kept::open(name).map(|(kept, messages)| (Some(kept), messages))?,
        None => (None, Vec::new()),
    };
    if let Some(kept) = &kept {
        kept.load(&mut session);
    }
    let speculation = args.text.speculation.begin(
        session.engine(),
        session.sequence().n_ctx(),
        &args.text.session,
    )?;
    keep_for(&mut session, speculation.as_ref());
    let id = session_id(args);
    let memory = args.memory.open(&mut session)?;
    let learning = (args.text).begin_learning(&session, id.clone())?;
    let cancel = session.cancel_token();
    let interactive = stdin_is_terminal() && io::stdout().is_terminal();
    let lines = Lines::new(interactive)?;
    // After the editor, which has a handler of its own; it sees Ctrl-C as a key.
    let (interrupted, interrupt) = (cancel.clone(), lines.interrupter());
    on_interrupt(move || {
        interrupted.cancel();
        interrupt();
    })?;

    let mut chat = Chat {
        args,
        tokenizer,
        template,
        told: Vec::new(),
        stop,
        n_batch: options.n_batch,
        context_shift: options
            .context_shift
            .map(|keep| keep.next_multiple_of(KV_BLOCK)),
        session,
        speculation,
        learning,
        memory,
        id,
        said: String::new(),
        sampling: args.text.sampling.clone(),
        sampler,
        cancel,
        interactive,
        messages,
        kept,
        timings: None,
        images: None,
        pictures: Pictures::default(),
        next_pictures: String::new(),
    };
    if let Some(system) = system {
        chat.instruct(system);
    }
    if interactive {
        note(paint(
            "2",
            &format!(
                "{}, context {}; /help tells the commands",
                args.model.label(),
                chat.session.sequence().n_ctx()
            ),
        ));
    }
    let is_said = |message: &&Message| message.role != "system";
    let n_kept = chat.messages.iter().filter(is_said).count();
    if args.session.is_some() && n_kept > 0 {
        note(paint(
            "2",
            &format!("[a conversation of {n_kept} messages goes on]"),
        ));
    }
    let outcome = chat.converse(lines);
    tell_failure(chat.session.engine());
    if chat.speculation.is_some() {
        crate::io::measured::keep(chat.session.engine(), &args.model.label(), None);
    }
    let outcome = match &chat.kept {
        Some(kept) => outcome.and(kept.save(&chat.session)),
        None => outcome,
    };
    match chat.learning {
        Some(learning) => learning.end(&chat.session, outcome),
        None => outcome,
    }
}

/// The chat template, and what ends an answer.
fn template(args: &Args, model: &Model) -> Result<(Renderer, Vec<String>), Failure> {
    let template = args.template.source(model.chat_template())?;
    if template.is_transcript {
        note(paint("33", &transcript_note(&args.model.label())));
    }
    let stop = [args.text.reverse_prompt.clone(), template.stops].concat();
    Ok((Renderer::new(&template.source)?, stop))
}

struct Chat<'a> {
    args: &'a Args,
    tokenizer: &'a Tokenizer,
    template: Renderer,
    /// Changes of the conversation that were told.
    told: Vec<Adjustment>,
    stop: Vec<String>,
    n_batch: usize,
    /// Tokens that a shift of the context keeps, in whole pages, if there is one.
    context_shift: Option<usize>,
    session: Session,
    speculation: Option<Speculation>,
    learning: Option<Learning>,
    memory: Option<Memory>,
    /// What records of the conversation are called.
    id: String,
    /// The last message, without what was told before it.
    said: String,
    /// What `sampler` was made of.
    sampling: SamplingArgs,
    sampler: Sampler,
    cancel: CancelToken,
    /// Someone types and reads; otherwise lines come from a pipe or go to one.
    interactive: bool,
    messages: Vec<Message>,
    kept: Option<Kept>,
    /// Those of the last answer.
    timings: Option<String>,
    /// What reads images, once there are some.
    images: Option<ImageTemplate>,
    /// Images of the conversation.
    pictures: Pictures,
    /// What stands for those that the next message is about.
    next_pictures: String,
}

impl Chat<'_> {
    /// Answers the first message, then those of lines until there are no more.
    fn converse(&mut self, mut lines: Lines) -> Result<(), Failure> {
        for image in self.args.images.images()? {
            self.add_image(image)?;
        }
        if let Some(first) = &self.args.prompt {
            note(format!("> {first}"));
            self.say(first)?;
        }
        let mut text = String::new();
        let mut history = None;
        let mut warned = false;
        loop {
            let prompt = match (self.interactive, text.is_empty()) {
                (false, _) => "",
                (true, true) => "> ",
                (true, false) => "… ",
            };
            if self.interactive {
                // Ctrl-C pressed a moment after the answer was complete.
                lines.forget_interrupts();
            }
            match lines.next(prompt, history.take())? {
                Ok(line) => {
                    warned = false;
                    if let Some(begun) = line.strip_suffix('\\') {
                        text.push_str(begun);
                        text.push('\n');
                        continue;
                    }
                    text.push_str(&line);
                    let text = std::mem::take(&mut text);
                    if text.trim().is_empty() {
                        continue;
                    }
                    history = Some(text.clone());
                    if self.take(&text)? {
                        break;
                    }
                }
                Err(ReadlineError::Interrupted) if text.is_empty() && warned => break,
                Err(ReadlineError::Interrupted) => {
                    warned = text.is_empty();
                    text.clear();
                    note("Ctrl-C again, Ctrl-D or /exit leaves.");
                }
                Err(ReadlineError::Eof) => break,
                Err(error) => {
                    return Err(Failure::Work(format!(
                        "standard input, line {}: {error}",
                        lines.n()
                    )));
                }
            }
        }
        lines.end();
        Ok(())
    }

    /// Does what a line says; true: it ends the conversation. What is wrong with a command is told
    /// to who types, and ends a conversation that comes from a pipe.
    fn take(&mut self, line: &str) -> Result<bool, Failure> {
        let command = match Command::of(line.trim()) {
            Ok(Command::Leave) => return Ok(true),
            Ok(Command::Message) => return self.say(line).map(|()| false),
            command => command,
        };
        match command.and_then(|command| self.obey(command)) {
            Err(Failure::Work(why) | Failure::Usage(why)) if self.interactive => {
                note(format!("error: {}", printable(why.trim_end())));
            }
            outcome => outcome?,
        }
        Ok(false)
    }

    fn obey(&mut self, command: Command<'_>) -> Result<(), Failure> {
        match command {
            Command::Regenerate => self.regenerate()?,
            Command::System(text) => self.system(text)?,
            Command::Set(flag) => self.set(flag)?,
            Command::Image(path) => {
                self.add_image(picture::open(path)?)?;
                self.tell("the next message is about this picture");
            }
            Command::Save(name) => self.save(&name)?,
            Command::Load(name) => self.load(&name)?,
            Command::Remember(text) => {
                let text = text.map_or_else(|| self.said.clone(), str::to_owned);
                self.remember(NewEntry::taught(text))?;
            }
            Command::Correct(text) => self.remember(NewEntry::correction(text))?,
            Command::Memory => {
                let memory = self.memory()?;
                let lines = memory.entries().iter();
                lines.for_each(|entry| note(entry_line(memory, entry)));
                note(match memory.entries().len() {
                    0 => "Nothing is remembered; /remember TEXT remembers a text.",
                    _ => "/forget N forgets an entry.",
                });
            }
            Command::Forget(number) => self.memory()?.forget(number)?,
            Command::Rate(is_good) => self.rate(is_good),
            Command::Stats => self.tell_stats(),
            Command::Clear => {
                self.messages.retain(|message| message.role == "system");
                self.keep()?;
                note("The conversation is forgotten.");
            }
            Command::Help => note(COMMANDS),
            Command::Unknown(word) => note(format!(
                "error: {word} is no command; there are\n{COMMANDS}"
            )),
            Command::Message | Command::Leave => {}
        }
        Ok(())
    }

    /// Answers `text`; failures that another message could avoid are told and forgotten.
    fn say(&mut self, text: &str) -> Result<(), Failure> {
        let pictures = std::mem::take(&mut self.next_pictures);
        self.said = Pictures::without_marks(text);
        let notes = self.notes()?;
        let message = pictures + &notes + &self.said;
        self.messages.push(Message::user(message));
        self.answer()
    }

    /// What is remembered and like the last message, to be told before it.
    fn notes(&mut self) -> Result<String, Failure> {
        let Some(memory) = &mut self.memory else {
            return Ok(String::new());
        };
        let notes = notes(memory, &self.said, self.tokenizer)?;
        if self.interactive && !notes.numbers.is_empty() {
            let numbers: Vec<String> = notes.numbers.iter().map(u64::to_string).collect();
            self.tell(&format!(
                "told of the memory: {}, in {} tokens",
                numbers.join(", "),
                notes.n_tokens
            ));
        }
        Ok(Pictures::without_marks(&notes.text))
    }

    fn memory(&mut self) -> Result<&mut Memory, Failure> {
        let missing = "nothing is remembered here; start chat with --memory DIR";
        (self.memory.as_mut()).ok_or_else(|| Failure::Usage(missing.into()))
    }

    fn remember(&mut self, mut new: NewEntry) -> Result<(), Failure> {
        new.session.clone_from(&self.id);
        remember(self.memory()?, new)
    }

    /// Takes an image into the next message.
    fn add_image(&mut self, image: ruvllm::vision::Image) -> Result<(), Failure> {
        if self.kept.is_some() {
            return Err(Failure::Usage(KEPT_AS_TEXT.into()));
        }
        if self.learning.is_some() {
            let message = "images do not go with --learn: texts alone are learnt from";
            return Err(Failure::Usage(message.into()));
        }
        if self.images.is_none() {
            let Args {
                images,
                model,
                text,
                ..
            } = self.args;
            let projector = images.open(model, &text.session, self.session.model())?;
            let images = ImageTemplate::new(projector, images.options(), &self.template);
            self.images = Some(images);
        }
        self.next_pictures.push_str(&self.pictures.add(image));
        Ok(())
    }

    fn tell(&self, text: &str) {
        note(paint("2", &format!("[{text}]")));
    }

    fn regenerate(&mut self) -> Result<(), Failure> {
        self.messages.pop_if(|last| last.role == "assistant");
        if self.messages.last().is_none_or(|last| last.role != "user") {
            note("There is no message to answer.");
            return Ok(());
        }
        self.answer()
    }

    /// Rates the last answer.
    fn rate(&mut self, is_good: bool) {
        let Some(learning) = &self.learning else {
            note("error: nothing is learnt here; start chat with --learn DIR");
            return;
        };
        match learning.rate(&mut self.session, is_good) {
            Ok(true) => note("Learnt."),
            Ok(false) => note("Noted."),
            Err(error) => note(format!("error: {error}")),
        }
    }

    fn tell_stats(&self) {
        match &self.timings {
            Some(timings) => self.tell(timings),
            None => self.tell(&format!(
                "no answer yet; {} of {} tokens in context",
                self.session.position(),
                self.session.sequence().n_ctx()
            )),
        }
    }

    /// Tells the model how to behave, or shows what it was told.
    fn system(&mut self, text: Option<&str>) -> Result<(), Failure> {
        if let Some(text) = text {
            self.instruct(Pictures::without_marks(text));
            return self.keep();
        }
        let told = self.messages.iter().find(|told| told.role == "system");
        match told {
            Some(message) => note(printable(&message.content)),
            None => self.tell("it was told nothing"),
        }
        Ok(())
    }

    /// Makes `text` the one system message, the first.
    fn instruct(&mut self, text: String) {
        self.messages.retain(|message| message.role != "system");
        self.messages.insert(0, Message::system(text));
    }

    /// Changes a flag of sampling, or shows what they are.
    fn set(&mut self, flag: Option<(&str, Option<&str>)>) -> Result<(), Failure> {
        let model = self.session.model().clone();
        let Some((name, value)) = flag else {
            let metadata = model.gguf().metadata();
            let options = self.sampling.options(metadata, self.tokenizer)?;
            note(format!(
                "temp {}, top-k {}, top-p {}, min-p {}, repeat-penalty {}; `ruvllm chat --help` has all",
                options.temperature,
                options.top_k,
                options.top_p,
                options.min_p,
                options.repeat_penalty
            ));
            return Ok(());
        };
        let flag = match name.trim_start_matches('-') {
            letter if letter.chars().count() == 1 => format!("-{letter}"),
            name => format!("--{name}"),
        };
        let given: Vec<&str> = [Some(&flag[..]), value].into_iter().flatten().collect();
        let sampling = (self.sampling.with(&given)).map_err(|error| {
            let why = error.to_string();
            let why = why.lines().next().unwrap_or_default();
            Failure::Usage(why.trim_start_matches("error: ").to_string())
        })?;
        self.sampler = sampling.sampler(&model, self.tokenizer)?;
        self.sampling = sampling;
        Ok(())
    }

    /// Keeps the conversation under that name from now on.
    fn save(&mut self, name: &SessionName) -> Result<(), Failure> {
        self.has_no_images()?;
        if Kept::exists(name)? {
            return Err(Failure::Usage(format!(
                "there is a conversation {name} already: /load {name} goes on with it"
            )));
        }
        let (kept, _) = Kept::open(name)?;
        self.change(kept)?;
        self.keep()?;
        self.tell(&format!("kept as {name}, with what follows"));
        Ok(())
    }

    /// Goes on with the conversation of that name.
    fn load(&mut self, name: &SessionName) -> Result<(), Failure> {
        self.has_no_images()?;
        if !Kept::exists(name)? {
            return Err(Failure::Usage(format!(
                "there is no conversation {name}; `ruvllm sessions` lists all"
            )));
        }
        let (kept, messages) = Kept::open(name)?;
        self.change(kept)?;
        if let Some(kept) = &self.kept {
            kept.load(&mut self.session);
        }
        self.messages = messages;
        self.tell(&format!(
            "a conversation of {} messages goes on",
            self.messages.len()
        ));
        Ok(())
    }

    fn has_no_images(&self) -> Result<(), Failure> {
        if self.pictures.is_empty() {
            return Ok(());
        }
        Err(Failure::Usage(KEPT_AS_TEXT.into()))
    }

    /// Another conversation takes the place of the one that was kept until now.
    fn change(&mut self, kept: Kept) -> Result<(), Failure> {
        match self.kept.replace(kept) {
            Some(left) => left.save(&self.session),
            None => Ok(()),
        }
    }

    fn answer(&mut self) -> Result<(), Failure> {
        if self.interactive {
            self.cancel.reset();
        }
        let mut answer = String::new();
        let outcome = self.generate(&mut answer);
        if !answer.is_empty() && !answer.ends_with('\n') {
            print("\n")?;
        }
        match outcome {
            Ok(notes) => notes.iter().for_each(note),
            Err(Stop::Cancelled) if !self.interactive => return Err(Failure::Interrupted),
            Err(Stop::Cancelled) if !answer.is_empty() => note(paint("2", "[stopped]")),
            Err(Stop::Failed(Failure::Closed)) => return Err(Failure::Closed),
            Err(stop) => {
                self.messages.pop();
                match stop {
                    Stop::Failed(Failure::Work(message)) if self.interactive => {
                        note(format!("error: {}", printable(&message)))
                    }
                    Stop::Failed(failure) => return Err(failure),
                    Stop::Cancelled => note(paint("2", "[stopped; the message is forgotten]")),
                }
                return Ok(());
            }
        }
        self.messages.push(Message::assistant(answer));
        self.keep()?;
        if self.learning.is_some() {
            self.session.update()?;
        }
        Ok(())
    }

    /// Saves the messages, if they are to be kept.
    fn keep(&self) -> Result<(), Failure> {
        self.kept
            .as_ref()
            .map_or(Ok(()), |kept| kept.save_messages(&self.messages))
    }

    /// Prints the answer to the conversation as it is, and collects it; notes on it for the user.
    fn generate(&mut self, answer: &mut String) -> Result<Vec<String>, Stop> {
        let prompt = self.prompt()?;
        let ids = prompt.tokens().to_vec();
        if let Some(learning) = &mut self.learning {
            learning.refresh(&mut self.session, &ids)?;
        }
        let kept = match self.session.images().keep(&prompt) {
            0 if !prompt.has_images() => self.session.cache().reuse(&ids)?.total(),
            kept => kept,
        };
        // Each answer begins the grammar anew.
        if let Some(mask) = self.sampler.mask_mut() {
            mask.reset();
        }

        // What an answer that failed has left.
        self.session.hooks().take_pooled();
        let start = Instant::now();
        let (with_images, new) = prompt.skip(kept).split();
        if let Some(last) = with_images.tokens().len().checked_sub(1) {
            self.session
                .images()
                .prefill_encoded(&with_images, last, |_, _| ())?;
        }
        let n_read = read(&mut self.session, &new, self.n_batch, false)?;
        let generation = self
            .session
            .generate(&new[n_read..], &mut self.sampler)?
            .stop(self.stop.iter().cloned())
            .max_tokens(self.args.text.max_tokens());
        let mut generation = speculate(generation, self.speculation.as_ref());
        let prefill = start.elapsed();
        let start = Instant::now();
        let mut begun = false;
        for piece in &mut generation {
            let text = piece?.text;
            // Templates differ in whether the answer begins with the space or line end before it.
            let shown = if begun { &text[..] } else { text.trim_start() };
            if !shown.is_empty() {
                begun = true;
                print(shown)?;
                answer.push_str(shown);
            }
        }
        let decode = start.elapsed();
        let n = generation.tokens().len();
        let answer = generation.tokens().to_vec();
        let drafted = Drafted::of(&generation);
        let reason = generation.finish().map(|finish| finish.reason);
        drop(generation);
        if let Some(learning) = &mut self.learning {
            learning.record(&mut self.session, &ids, &answer, prefill + decode)?;
        }
        let mut notes = Vec::new();
        let (n_read, rate) = (ids.len() - kept, per_second(ids.len() - kept, prefill));
        let timings = format!(
            "{n_read} tokens read, {rate:.1}/s; {n} written, {:.1}/s{}; {} of {} in context",
            per_second(n, decode),
            drafted.note(),
            self.session.position(),
            self.session.sequence().n_ctx()
        );
        if self.args.text.verbose {
            notes.push(paint("2", &format!("[{timings}]")));
        }
        self.timings = Some(timings);
        match reason {
            Some(StopReason::ContextFull) => notes.push(paint(
                "33",
                "\n[the context is full: /clear, or start with a larger -c]",
            )),
            Some(StopReason::MaxTokens) => notes.push(paint("2", "\n[-n reached]")),
            Some(StopReason::MaskLimit) => notes.push(paint(
                "33",
                "\n[the grammar has reached its limits: the text is not complete]",
            )),
            _ => {}
        }
        Ok(notes)
    }

    /// The tokens of the conversation, and its images. Forgets the oldest turns when they do not fit.
    fn prompt(&mut self) -> Result<EncodedPrompt, Stop> {
        let mut forgotten = 0;
        loop {
            let mut shown = Vec::new();
            let mut inputs = ChatInputs {
                bos_token: bos_text(Some(self.tokenizer)),
                eos_token: eos_text(Some(self.tokenizer)),
                ..ChatInputs::new(&self.messages)
            };
            let images = self.images.as_ref();
            for message in inputs.messages.as_array_mut().into_iter().flatten() {
                self.pictures.expand(&mut message["content"], &mut shown);
                images.iter().for_each(|of| of.fit(&mut message["content"]));
            }
            let images = images.filter(|_| !shown.is_empty());
            let markers = |text: &str| images.map_or_else(Vec::new, |of| of.find_in_text(text));
            let guard = Some(self.tokenizer).filter(|_| !self.args.template.parse_user_special);
            let (rendered, plain) =
                self.template
                    .render_guarded(&inputs, guard, markers, || self.cancel.is_cancelled())?;
            for adjustment in rendered.adjusted {
                if !self.told.contains(&adjustment) {
                    self.told.push(adjustment);
                    note(paint("33", &format!("[{adjustment}]")));
                }
            }
            if let Some(images) = images {
                let texts = images.texts(&rendered.text, &plain, shown.len());
                let texts = texts.map_err(Failure::Work)?;
                let all = shown.iter().map(|&image| (image, images.options));
                let (engine, reader) = (self.session.engine(), (&images.projector, images.options));
                let all = parts(&texts, all);
                let n = engine.count_parts(reader, &all)?;
                if n < self.session.sequence().n_ctx() {
                    return Ok(engine.encode_parts(reader, &all, &self.cancel)?);
                }
                return Err(Stop::Failed(Failure::Work(format!(
                    "the conversation with its images has {n} tokens, the context {}: /clear, or start with a larger -c or --image-max-tokens",
                    self.session.sequence().n_ctx()
                ))));
            }
            let ids = self.tokenizer.encode_prompt_but(&rendered.text, &plain);
            if ids.is_empty() {
                return Err(Stop::Failed(Failure::Work(
                    "the chat template made no text of the message".into(),
                )));
            }
            if let Some(shifted) = self.shifted(&ids)? {
                return Ok(shifted.into());
            }
            if ids.len() < self.session.sequence().n_ctx() {
                if forgotten > 0 {
                    note(paint(
                        "33",
                        &format!(
                            "[the context is full: the oldest {forgotten} messages are forgotten]"
                        ),
                    ));
                }
                return Ok(ids.into());
            }
            let oldest = self
                .messages
                .iter()
                .position(|message| message.role != "system")
                .unwrap_or(0);
            let next_turn = self
                .messages
                .iter()
                .skip(oldest + 1)
                .position(|message| message.role == "user");
            let Some(n) = next_turn.map(|n| n + 1) else {
                return Err(Stop::Failed(Failure::Work(format!(
                    "the message has {} tokens with its template, the context {}: shorten it, or start with a larger -c",
                    ids.len(),
                    self.session.sequence().n_ctx()
                ))));
            };
            self.messages.drain(oldest..oldest + n);
            forgotten += n;
        }
    }

    /// With --context-shift, the tokens of a conversation that has outgrown the context without
    /// those that were dropped; nothing if it has not, or if the session holds too little of
    /// it.
    fn shifted(&mut self, ids: &[u32]) -> Result<Option<Vec<u32>>, Stop> {
        let Some(keep) = self.context_shift.filter(|&keep| keep < ids.len()) else {
            return Ok(None);
        };
        loop {
            let n_dropped = self.session.sequence().n_dropped();
            let Some(rest) = ids[keep..].get(n_dropped..) else {
                return Ok(None);
            };
            let left = [&ids[..keep], rest].concat();
            if left.len() < self.session.sequence().n_ctx() {
                return Ok((n_dropped > 0).then_some(left));
            }
            // Of an answer the text is what counts, which may have other tokens than were
            // generated.
            self.session.cache().keep(&left);
            if self.session.sequence().n_dropped() < n_dropped || self.session.cache().shift()? == 0
            {
                return Ok(None);
            }
        }
    }
}

/// Why an answer was not finished.
enum Stop {
    Cancelled,
    Failed(Failure),
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Stop {
        match failure {
            Failure::Interrupted => Stop::Cancelled,
            failure => Stop::Failed(failure),
        }
    }
}

impl From<Error> for Stop {
    fn from(error: Error) -> Stop {
        match error {
            Error::Session(SessionError::Cancelled) => Stop::Cancelled,
            error => Stop::Failed(error.into()),
        }
    }
}

impl From<PartsError> for Stop {
    fn from(error: PartsError) -> Stop {
        Error::from(error).into()
    }
}

impl From<DecodeError> for Stop {
    fn from(error: DecodeError) -> Stop {
        Error::from(error).into()
    }
}

impl From<SessionError> for Stop {
    fn from(error: SessionError) -> Stop {
        Error::from(error).into()
    }
}

impl From<ruvllm::chat::ChatError> for Stop {
    fn from(error: ruvllm::chat::ChatError) -> Stop {
        match error {
            ruvllm::chat::ChatError::Cancelled => Stop::Cancelled,
            error => Error::from(error).into(),
        }
    }
}
