//! Pre-tokenisers: how each family of byte-level BPE cuts a text into words before merging.
//!
//! Model authors publish these as regular expressions. Each is written by hand here, as the
//! alternatives quoted in its documentation, in order; there is no regex engine, nothing backtracks
//! further than one quoted alternative, and every splitter takes linear time in the length of the
//! text.
//!
//! Where a published pattern and llama.cpp's version of it differ, llama.cpp's is followed, since
//! GGUF files are used with that (`tiny_aya` and `youtu` do not see case). But `gpt-4o` and `tekken`
//! take case and marks from Unicode, as their authors' tokenisers do: llama.cpp knows case of ASCII
//! letters only there and cuts words at marks, which is wrong for most languages of India.

use crate::tokenizer::TokenizerError;
use crate::tokenizer::unicode::{Char, L, LOWER, M, N, P, S, UPPER, WS};

/// Callback for the pieces of a text.
type Sink<'a> = &'a mut dyn FnMut(&[Char]);

/// One step of a pre-tokeniser. Each step splits every piece of the step before.
#[derive(Clone, Copy)]
enum Stage {
    /// The length of the match at the start of the slice, if any. Matches become pieces, and so
    /// does the text between two of them.
    Find(fn(&[Char]) -> Option<usize>),
    /// Splits the slice into pieces itself.
    Cut(fn(&[Char], Sink<'_>)),
}
use Stage::{Cut, Find};

/// A pre-tokeniser, as named by `tokenizer.ggml.pre`.
pub(super) struct PreTokenizer {
    /// Its names.
    names: &'static [&'static str],
    stages: &'static [Stage],
    /// Whether a word that is a token becomes that token, whatever the merges say.
    pub(super) ignore_merges: bool,
    /// Whether to prepend BOS unless the file says otherwise.
    pub(super) add_bos: bool,
    /// Whether detokenising removes the spaces before `?!.,` and some apostrophes.
    pub(super) clean_spaces: bool,
    /// Whether merges apply to UTF-8 text with `▁` for the space and `<0xNN>` for single bytes,
    /// instead of GPT-2's byte alphabet.
    pub(super) raw_utf8: bool,
    /// Whether white space stays what it is in such text; the stages drop it.
    pub(super) keeps_spaces: bool,
    /// Whether files may lack merges: then words that are no tokens become tokens of single bytes.
    pub(super) may_lack_merges: bool,
    /// BOS and EOS if the file names none.
    pub(super) default_bos: Option<u32>,
    pub(super) default_eos: Option<u32>,
}

const BASE: PreTokenizer = PreTokenizer {
    names: &[],
    stages: &[],
    ignore_merges: false,
    add_bos: false,
    clean_spaces: true,
    raw_utf8: false,
    keeps_spaces: false,
    may_lack_merges: false,
    // Falcon's first files do not name these tokens.
    default_bos: Some(11),
    default_eos: Some(11),
};
/// [`BASE`] without the clean-up of spaces.
const PLAIN: PreTokenizer = PreTokenizer {
    clean_spaces: false,
    ..BASE
};

/// Every known pre-tokeniser. An unknown name is refused: a wrong pre-tokeniser would make the
/// model write fluent nonsense.
#[rustfmt::skip]
static PRE_TOKENIZERS: &[PreTokenizer] = &[
    PreTokenizer { names: &["default"], stages: &[Find(marks), Find(gpt2), Find(numbers), Find(three_digits)], ..BASE },
    PreTokenizer {
        names: &["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"],
        stages: &[Find(llama3)],
        ignore_merges: true,
        add_bos: true,
        ..BASE
    },
    PreTokenizer { names: &["dbrx", "smaug-bpe"], stages: &[Find(llama3)], ..BASE },
    PreTokenizer { names: &["chatglm-bpe"], stages: &[Find(llama3)], default_bos: None, ..BASE },
    PreTokenizer { names: &["glm4", "glm5"], stages: &[Find(llama3)], default_bos: None, ignore_merges: true, ..BASE },
    PreTokenizer { names: &["jais-2"], stages: &[Find(llama3), Cut(space_runs)], ..BASE },
    PreTokenizer { names: &["minicpm5"], stages: &[Find(number_1_3), Find(minicpm5)], ignore_merges: true, ..BASE },
    PreTokenizer {
        names: &["qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "hunyuan", "solar-open", "grok-2"],
        stages: &[Find(qwen2)],
        ..PLAIN
    },
    PreTokenizer { names: &["stablelm2", "megrez"], stages: &[Find(qwen2)], ..BASE },
    PreTokenizer { names: &["qwen35"], stages: &[Find(qwen35)], ..PLAIN },
    PreTokenizer { names: &["laguna"], stages: &[Find(lines), Find(qwen2)], ..PLAIN },
    PreTokenizer { names: &["ufakzeka"], stages: &[Find(ufakzeka)], ..PLAIN },
    PreTokenizer { names: &["bailingmoe", "bailingmoe2", "llada-moe"], stages: &[Find(qwen2)], ..PLAIN },
    PreTokenizer { names: &["seed-coder"], stages: &[Find(seed_coder)], ..PLAIN },
    PreTokenizer { names: &["exaone-moe"], stages: &[Find(exaone_moe)], ..BASE },
    PreTokenizer {
        names: &["gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "a.x-4.0", "mellum", "modern-bert", "exaone4",
                 "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "jina-v1-en", "jina-v2-code", "roberta-bpe"],
        stages: &[Find(gpt2)],
        ..BASE
    },
    PreTokenizer { names: &["trillion", "granite-docling"], stages: &[Find(gpt2)], ..PLAIN },
    PreTokenizer {
        names: &["starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"],
        stages: &[Find(number), Find(gpt2)],
        ..BASE
    },
    PreTokenizer { names: &["command-r", "smollm"], stages: &[Find(number), Find(gpt2)], ..PLAIN },
    PreTokenizer { names: &["falcon"], stages: &[Find(falcon_marks), Find(gpt2), Find(three_digits)], ..BASE },
    PreTokenizer {
        names: &["deepseek-llm"],
        stages: &[Find(newline), Find(cased), Find(deepseek_marks), Cut(trailing_space), Find(cjk), Find(numbers)],
        ..PLAIN
    },
    PreTokenizer {
        names: &["deepseek-coder"],
        stages: &[Find(newline), Find(spaced_letters), Find(spaced_punctuation), Find(cjk), Find(number)],
        ..PLAIN
    },
    PreTokenizer {
        names: &["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"],
        stages: &[Find(number_1_3), Find(kana_han), Find(deepseek3)],
        ..PLAIN
    },
    PreTokenizer {
        names: &["spark2_5"],
        stages: &[Find(number_1_3), Find(kana_han), Find(spark), Find(number)],
        ..PLAIN
    },
    PreTokenizer { names: &["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"], stages: &[Find(gpt4o)], ..PLAIN },
    PreTokenizer {
        names: &["granite-embed-multi-97m"],
        stages: &[Find(gpt4o)],
        ignore_merges: true,
        ..PLAIN
    },
    PreTokenizer { names: &["tekken"], stages: &[Find(tekken)], ignore_merges: true, add_bos: true, ..PLAIN },
    PreTokenizer { names: &["tiny_aya", "cohere2moe"], stages: &[Cut(digit_groups), Find(tiny_aya)], ..PLAIN },
    PreTokenizer { names: &["youtu"], stages: &[Find(youtu_scripts), Find(youtu)], ignore_merges: true, ..PLAIN },
    PreTokenizer { names: &["superbpe"], stages: &[Find(numbers), Cut(ascii_digit_groups)], ..PLAIN },
    PreTokenizer { names: &["poro-chat"], stages: &[Find(bloom)], ..PLAIN },
    PreTokenizer { names: &["bloom", "gpt3-finnish"], stages: &[Find(bloom)], ..BASE },
    PreTokenizer { names: &["viking"], stages: &[Find(bloom), Find(number)], ..PLAIN },
    PreTokenizer {
        names: &["gemma4", "granite-embed-multi-311m"],
        stages: &[Find(lines)],
        raw_utf8: true,
        add_bos: true,
        default_bos: None,
        default_eos: None,
        ..BASE
    },
    PreTokenizer { names: &["sarvam-moe"], stages: &[Find(lines)], raw_utf8: true, default_bos: None, default_eos: None, ..PLAIN },
    PreTokenizer { names: &["afmoe"], stages: &[Cut(digit_groups), Find(unspaced_scripts), Find(deepseek3)], ..PLAIN },
    PreTokenizer { names: &["kimi-k2"], stages: &[Find(kimi)], may_lack_merges: true, ..PLAIN },
    PreTokenizer {
        names: &["chameleon"],
        stages: &[Find(sentinel), Find(image_tokens), Find(single_spaces), Find(number), Find(mark), Find(gpt2)],
        add_bos: true,
        ..PLAIN
    },
    PreTokenizer { names: &["whitespace"], stages: &[Cut(words)], raw_utf8: true, keeps_spaces: true, ..PLAIN },
];

impl PreTokenizer {
    /// The pre-tokeniser called `name`.
    pub(super) fn by_name(name: &str) -> Result<&'static PreTokenizer, TokenizerError> {
        PRE_TOKENIZERS
            .iter()
            .find(|p| p.names.contains(&name))
            .ok_or_else(|| {
                let mut known: Vec<&str> = PRE_TOKENIZERS
                    .iter()
                    .flat_map(|p| p.names)
                    .copied()
                    .collect();
                known.sort_unstable();
                TokenizerError::PreTokenizer {
                    name: name.to_owned(),
                    known: known.join(", "),
                }
            })
    }

    /// Calls `word` with the words of `text`, in order; concatenated they are `text`, but that some
    /// drop white space.
    pub(super) fn split(&self, text: &[Char], word: Sink<'_>) {
        refine(self.stages, text, word);
    }
}

fn refine(stages: &[Stage], text: &[Char], word: Sink<'_>) {
    let Some((stage, rest)) = stages.split_first() else {
        if !text.is_empty() {
            word(text);
        }
        return;
    };
    match stage {
        Cut(cut) => cut(text, &mut |piece| refine(rest, piece, word)),
        Find(find) => {
            let (mut start, mut at) = (0, 0);
            while at < text.len() {
                let Some(n) = find(&text[at..]) else {
                    at += 1;
                    continue;
                };
                if start < at {
                    refine(rest, &text[start..at], word);
                }
                refine(rest, &text[at..at + n], word);
                at += n;
                start = at;
            }
            if start < at {
                refine(rest, &text[start..], word);
            }
        }
    }
}

// Pattern elements. `t` is never empty at the start of a stage, and every match is non-empty.

/// Length of the longest prefix of `t` whose characters satisfy `p`: `p*`.
fn star(t: &[Char], p: impl Fn(Char) -> bool) -> usize {
    t.iter().position(|&c| !p(c)).unwrap_or(t.len())
}

/// `p+`.
fn plus(t: &[Char], p: impl Fn(Char) -> bool) -> Option<usize> {
    Some(star(t, p)).filter(|&n| n > 0)
}

/// `lead?p+`; a lead that is not followed by `p` may itself begin `p+`.
fn lead_plus(t: &[Char], lead: impl Fn(Char) -> bool, p: impl Fn(Char) -> bool) -> Option<usize> {
    if lead(t[0])
        && let Some(n) = plus(&t[1..], &p)
    {
        return Some(n + 1);
    }
    plus(t, p)
}

fn is_newline(c: Char) -> bool {
    c.eq(b'\n') || c.eq(b'\r')
}

fn is_space(c: Char) -> bool {
    c.eq(b' ')
}

fn in_ranges(c: Char, ranges: &[(u32, u32)]) -> bool {
    // Some patterns' ranges include white space, which must not match.
    let i = ranges.partition_point(|&(first, _)| first <= c.cp());
    i > 0 && c.cp() <= ranges[i - 1].1 && !c.is(WS)
}

/// `'s|'t|'re|'ve|'m|'ll|'d`, in any case of letters if `fold`.
fn contraction(t: &[Char], fold: bool) -> Option<usize> {
    if !t[0].eq(b'\'') {
        return None;
    }
    let at = |i: usize| match t.get(i)?.ascii() {
        Some(c) if fold => Some(c.to_ascii_lowercase()),
        // The only other letter that is one of these in another case.
        None if fold && t[i].cp() == u32::from('ſ') => Some(b's'),
        c => c,
    };
    match (at(1)?, at(2)) {
        (b's' | b't' | b'm' | b'd', _) => Some(2),
        (b'r' | b'v', Some(b'e')) | (b'l', Some(b'l')) => Some(3),
        _ => None,
    }
}

/// `(?i:'s|'t|'re|'ve|'m|'ll|'d)`
fn any_contraction(t: &[Char]) -> Option<usize> {
    contraction(t, true)
}

/// `[^\r\n\p{L}\p{N}]?\p{L}+`
fn word(t: &[Char]) -> Option<usize> {
    lead_plus(t, |c| !is_newline(c) && !c.is(L | N), |c| c.is(L))
}

/// ` ?[^\s\p{L}\p{N}]+`
fn other(t: &[Char]) -> Option<usize> {
    lead_plus(t, is_space, |c| !c.is(WS | L | N))
}

/// ` ?[^\s\p{L}\p{N}]+[\r\n]*`
fn other_newlines(t: &[Char]) -> Option<usize> {
    other(t).map(|n| n + star(&t[n..], is_newline))
}

/// ` ?[^\s\p{L}\p{N}]+[\r\n/]*`
fn other_newlines_slashes(t: &[Char]) -> Option<usize> {
    other(t).map(|n| n + star(&t[n..], |c| is_newline(c) || c.eq(b'/')))
}

/// `\s*[\r\n]+`
fn to_last_newline(t: &[Char]) -> Option<usize> {
    let space = star(t, |c| c.is(WS));
    t[..space]
        .iter()
        .rposition(|&c| is_newline(c))
        .map(|i| i + 1)
}

/// `\s+(?!\S)|\s+`
fn space(t: &[Char]) -> Option<usize> {
    let n = plus(t, |c| c.is(WS))?;
    // The last white-space character before a word belongs to the word.
    Some(if n < t.len() && n > 1 { n - 1 } else { n })
}

/// `\p{N}`
fn number(t: &[Char]) -> Option<usize> {
    t[0].is(N).then_some(1)
}

/// `\p{N}{1,3}`
fn number_1_3(t: &[Char]) -> Option<usize> {
    plus(&t[..t.len().min(3)], |c| c.is(N))
}

/// `\p{N}+`
fn numbers(t: &[Char]) -> Option<usize> {
    plus(t, |c| c.is(N))
}

// Whole patterns.

/// `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`
fn gpt2(t: &[Char]) -> Option<usize> {
    contraction(t, false)
        .or_else(|| lead_plus(t, is_space, |c| c.is(L)))
        .or_else(|| lead_plus(t, is_space, |c| c.is(N)))
        .or_else(|| other(t))
        .or_else(|| space(t))
}

/// `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|
/// ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
fn llama3(t: &[Char]) -> Option<usize> {
    any_contraction(t)
        .or_else(|| word(t))
        .or_else(|| number_1_3(t))
        .or_else(|| other_newlines(t))
        .or_else(|| to_last_newline(t))
        .or_else(|| space(t))
}

/// White space without a line end, in pieces of 512, then of smaller powers of two:
/// `\s{512}(?!\S)|\s{256}(?!\S)|…|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}`. Together they are one match of
/// [`llama3`], so that the text after them is searched only once.
fn space_runs(t: &[Char], piece: Sink<'_>) {
    if !t.iter().all(|&c| c.is(WS) && !is_newline(c)) {
        return piece(t);
    }
    let mut rest = t;
    while !rest.is_empty() {
        let n = (1 << rest.len().ilog2()).min(512);
        piece(&rest[..n]);
        rest = &rest[n..];
    }
}

/// [`llama3`] with `\p{N}+`.
fn minicpm5(t: &[Char]) -> Option<usize> {
    any_contraction(t)
        .or_else(|| word(t))
        .or_else(|| numbers(t))
        .or_else(|| other_newlines(t))
        .or_else(|| to_last_newline(t))
        .or_else(|| space(t))
}

/// `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|
/// ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
fn qwen2(t: &[Char]) -> Option<usize> {
    any_contraction(t).or_else(|| ufakzeka(t))
}

/// [`qwen2`] without contractions, so that Turkish suffixes stay attached.
fn ufakzeka(t: &[Char]) -> Option<usize> {
    word(t)
        .or_else(|| number(t))
        .or_else(|| other_newlines(t))
        .or_else(|| to_last_newline(t))
        .or_else(|| space(t))
}

/// [`qwen2`] with marks as part of words:
/// `…|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|…`
fn qwen35(t: &[Char]) -> Option<usize> {
    any_contraction(t)
        .or_else(|| lead_plus(t, |c| !is_newline(c) && !c.is(L | N), |c| c.is(L | M)))
        .or_else(|| number(t))
        .or_else(|| {
            let n = lead_plus(t, is_space, |c| !c.is(WS | L | M | N))?;
            Some(n + star(&t[n..], is_newline))
        })
        .or_else(|| to_last_newline(t))
        .or_else(|| space(t))
}

/// [`qwen2`] with ` ?[^\s\p{L}\p{N}\r\n]+` for characters that are neither letter nor number.
fn seed_coder(t: &[Char]) -> Option<usize> {
    any_contraction(t)
        .or_else(|| word(t))
        .or_else(|| number(t))
        .or_else(|| other(t))
        .or_else(|| to_last_newline(t))
        .or_else(|| space(t))
}

/// [`qwen2`] with words that continue across single spaces, `[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?:
/// \p{L}\p{M}*)*)+`, and ` ?[^\s\p{L}\p{N}]+[\r\n/]?`.
fn exaone_moe(t: &[Char]) -> Option<usize> {
    let phrase = || {
        let lead = usize::from(!is_newline(t[0]) && !t[0].is(L | N));
        let mut n = lead + t.get(lead).is_some_and(|c| c.is(L)).then_some(1)?;
        loop {
            n += star(&t[n..], |c| c.is(M));
            match &t[n..] {
                [c, ..] if c.is(L) => n += 1,
                [s, c, ..] if is_space(*s) && c.is(L) => n += 2,
                _ => return Some(n),
            }
        }
    };
    any_contraction(t)
        .or_else(phrase)
        .or_else(|| number(t))
        .or_else(|| {
            let n = other(t)?;
            Some(n + usize::from(t.get(n).is_some_and(|&c| is_newline(c) || c.eq(b'/'))))
        })
        .or_else(|| to_last_newline(t))
        .or_else(|| space(t))
}

/// Two alternatives for words that begin in upper case and end in lower case, where marks and letters
/// without case are either: `[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+`,
/// and the same with `+` and `*`.
fn cased_word(t: &[Char]) -> Option<usize> {
    let not_lower = |c: Char| c.is(L | M) && !c.is(LOWER);
    let not_upper = |c: Char| c.is(L | M) && !c.is(UPPER);
    let ends_lower = |t: &[Char]| {
        let head = star(t, not_lower);
        match star(&t[head..], not_upper) {
            // Shorten the head until the tail has one letter.
            0 => t[..head].iter().rposition(|&c| not_upper(c)).map(|i| i + 1),
            tail => Some(head + tail),
        }
    };
    let begins_upper = |t: &[Char]| {
        let head = plus(t, not_lower)?;
        Some(head + star(&t[head..], not_upper))
    };
    let lead = !is_newline(t[0]) && !t[0].is(L | N);
    let led = |m: &dyn Fn(&[Char]) -> Option<usize>| {
        let after = if lead {
            m(&t[1..]).map(|n| n + 1)
        } else {
            None
        };
        after.or_else(|| m(t))
    };
    led(&ends_lower).or_else(|| led(&begins_upper))
}

/// `n` characters of `t`, plus a contraction if one follows.
fn with_contraction(t: &[Char], n: usize) -> usize {
    n + if n < t.len() {
        any_contraction(&t[n..]).unwrap_or(0)
    } else {
        0
    }
}

/// [`cased_word`]`(?i:'s|…)?` in both alternatives, then
/// `|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`
fn gpt4o(t: &[Char]) -> Option<usize> {
    cased_word(t)
        .map(|n| with_contraction(t, n))
        .or_else(|| number_1_3(t))
        .or_else(|| other_newlines_slashes(t))
        .or_else(|| to_last_newline(t))
        .or_else(|| space(t))
}

/// [`gpt4o`] without contractions and with `\p{N}`.
fn tekken(t: &[Char]) -> Option<usize> {
    cased_word(t)
        .or_else(|| number(t))
        .or_else(|| other_newlines_slashes(t))
        .or_else(|| to_last_newline(t))
        .or_else(|| space(t))
}

/// `[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+(?i:'s|…)?`
fn marked_word(t: &[Char]) -> Option<usize> {
    lead_plus(t, |c| !is_newline(c) && !c.is(L | N), |c| c.is(L | M))
        .map(|n| with_contraction(t, n))
}

/// [`marked_word`]`|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`
fn tiny_aya(t: &[Char]) -> Option<usize> {
    marked_word(t)
        .or_else(|| number_1_3(t))
        .or_else(|| other_newlines_slashes(t))
        .or_else(|| to_last_newline(t))
        .or_else(|| space(t))
}

/// [`tiny_aya`] with `\p{N}`.
fn youtu(t: &[Char]) -> Option<usize> {
    marked_word(t)
        .or_else(|| number(t))
        .or_else(|| other_newlines_slashes(t))
        .or_else(|| to_last_newline(t))
        .or_else(|| space(t))
}

/// `[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+`
fn youtu_scripts(t: &[Char]) -> Option<usize> {
    const HANGUL: &[(u32, u32)] = &[(0x3131, 0x318e), (0xac00, 0xd7a3)];
    #[rustfmt::skip]
    const PUNCTUATION: &[(u32, u32)] = &[
        (0x2014, 0x2014), (0x2018, 0x2019), (0x201c, 0x201d), (0x2026, 0x2026), (0x3001, 0x303f),
        (0xfe30, 0xfe4f), (0xff01, 0xff01), (0xff0c, 0xff0c), (0xff1a, 0xff1b),
    ];
    const BOPOMOFO: &[(u32, u32)] = &[(0x3105, 0x312f)];
    plus(t, |c| in_ranges(c, HANGUL))
        .or_else(|| plus(t, |c| in_ranges(c, PUNCTUATION)))
        .or_else(|| plus(t, |c| in_ranges(c, BOPOMOFO)))
        .or_else(|| kana_han(t))
}

/// `[\p{P}$+<=>^~|]+`
fn marks(t: &[Char]) -> Option<usize> {
    plus(t, |c| {
        c.is(P) || c.ascii().is_some_and(|c| b"$+<=>^~|".contains(&c))
    })
}

/// ``[\p{P}$+<=>^~|`]+``
fn falcon_marks(t: &[Char]) -> Option<usize> {
    plus(t, |c| {
        c.is(P) || c.ascii().is_some_and(|c| b"$+<=>^~|`".contains(&c))
    })
}

/// `[0-9][0-9][0-9]`
fn three_digits(t: &[Char]) -> Option<usize> {
    let digit = |c: &Char| c.ascii().is_some_and(|c| c.is_ascii_digit());
    t.get(..3).filter(|t| t.iter().all(digit)).map(<[_]>::len)
}

/// `[\r\n]`
fn newline(t: &[Char]) -> Option<usize> {
    is_newline(t[0]).then_some(1)
}

/// `[^\n]+|[\n]+`
fn lines(t: &[Char]) -> Option<usize> {
    plus(t, |c| c.eq(b'\n') == t[0].eq(b'\n'))
}

/// `\s?\p{L}+`
fn spaced_letters(t: &[Char]) -> Option<usize> {
    lead_plus(t, |c| c.is(WS), |c| c.is(L))
}

/// `\s?\p{P}+`
fn spaced_punctuation(t: &[Char]) -> Option<usize> {
    lead_plus(t, |c| c.is(WS), |c| c.is(P))
}

/// `\s?[A-Za-zµÀ-ÖØ-öø-ƺ…]+`: the letters that have case.
fn cased(t: &[Char]) -> Option<usize> {
    #[rustfmt::skip]
    const CASED: &[(u32, u32)] = &[
        (0x41, 0x5a), (0x61, 0x7a), (0xb5, 0xb5), (0xc0, 0xd6), (0xd8, 0xf6), (0xf8, 0x1ba),
        (0x1bc, 0x1bf), (0x1c4, 0x293), (0x295, 0x2af), (0x370, 0x373), (0x376, 0x376), (0x377, 0x377),
        (0x37b, 0x37d), (0x37f, 0x37f), (0x386, 0x386), (0x388, 0x38a), (0x38c, 0x38c), (0x38e, 0x3a1),
        (0x3a3, 0x3f5), (0x3f7, 0x481), (0x48a, 0x52f), (0x531, 0x556), (0x10a0, 0x10c5),
        (0x13a0, 0x13f5), (0x13f8, 0x13fd), (0x1c90, 0x1cba), (0x1cbd, 0x1cbf), (0x1d00, 0x1d2b),
        (0x1d6b, 0x1d77), (0x1d79, 0x1d9a), (0x1e00, 0x1f15), (0x1f18, 0x1f1d), (0x1f20, 0x1f45),
        (0x1f48, 0x1f4d), (0x1f50, 0x1f57), (0x1f59, 0x1f59), (0x1f5b, 0x1f5b), (0x1f5d, 0x1f5d),
        (0x1f5f, 0x1f7d), (0x1f80, 0x1fb4), (0x1fb6, 0x1fbc), (0x1fbe, 0x1fbe), (0x1fc2, 0x1fc4),
        (0x1fc6, 0x1fcc), (0x1fd0, 0x1fd3), (0x1fd6, 0x1fdb), (0x1fe0, 0x1fec), (0x1ff2, 0x1ff4),
        (0x1ff6, 0x1ffc), (0x2102, 0x2102), (0x2107, 0x2107), (0x210a, 0x2113), (0x2115, 0x2115),
        (0x2119, 0x211d), (0x2124, 0x2124), (0x2126, 0x2126), (0x2128, 0x2128), (0x212a, 0x212d),
        (0x212f, 0x2134), (0x2139, 0x2139), (0x213c, 0x213f), (0x2145, 0x2149), (0x214e, 0x214e),
        (0x2183, 0x2183), (0x2184, 0x2184), (0x2c00, 0x2c7b), (0x2c7e, 0x2ce4), (0x2ceb, 0x2cee),
        (0x2cf2, 0x2cf2), (0x2cf3, 0x2cf3), (0xa640, 0xa66d), (0xa680, 0xa69b), (0xa722, 0xa76f),
        (0xa771, 0xa787), (0xa78b, 0xa78e), (0xab70, 0xabbf), (0xfb00, 0xfb06), (0xfb13, 0xfb17),
        (0xff21, 0xff3a), (0xff41, 0xff5a), (0x10400, 0x1044f), (0x104b0, 0x104d3), (0x104d8, 0x104fb),
        (0x10c80, 0x10cb2), (0x10cc0, 0x10cf2), (0x118a0, 0x118df), (0x1e900, 0x1e943),
    ];
    lead_plus(t, |c| c.is(WS), |c| in_ranges(c, CASED))
}

/// `\s?[!-/:-~！-／：-～‘-‟　-。]+`
fn deepseek_marks(t: &[Char]) -> Option<usize> {
    const MARKS: &[(u32, u32)] = &[
        (0x21, 0x2f),
        (0x3a, 0x7e),
        (0x2018, 0x201f),
        (0x3000, 0x3002),
        (0xff01, 0xff0f),
        (0xff1a, 0xff5e),
    ];
    lead_plus(t, |c| c.is(WS), |c| in_ranges(c, MARKS))
}

/// `\s+$`
fn trailing_space(t: &[Char], piece: Sink<'_>) {
    let n = t.iter().rposition(|c| !c.is(WS)).map_or(0, |i| i + 1);
    piece(&t[..n]);
    piece(&t[n..]);
}

/// `[一-龥ࠀ-一가-퟿]+`
fn cjk(t: &[Char]) -> Option<usize> {
    plus(t, |c| in_ranges(c, &[(0x800, 0x9fa5), (0xac00, 0xd7ff)]))
}

/// `[一-龥぀-ゟ゠-ヿ]+`
fn kana_han(t: &[Char]) -> Option<usize> {
    plus(t, |c| in_ranges(c, &[(0x3040, 0x30ff), (0x4e00, 0x9fa5)]))
}

/// ``[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+``
fn deepseek3_word(t: &[Char]) -> Option<usize> {
    let tag = || {
        t[0].ascii().filter(u8::is_ascii_punctuation)?;
        plus(&t[1..], |c| {
            c.ascii().is_some_and(|c| c.is_ascii_alphabetic())
        })
        .map(|n| n + 1)
    };
    tag().or_else(|| lead_plus(t, |c| !is_newline(c) && !c.is(L | P | S), |c| c.is(L | M)))
}

/// [`deepseek3_word`]`| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
fn deepseek3(t: &[Char]) -> Option<usize> {
    deepseek3_word(t)
        .or_else(|| {
            let n = lead_plus(t, is_space, |c| c.is(P | S))?;
            Some(n + star(&t[n..], is_newline))
        })
        .or_else(|| to_last_newline(t))
        .or_else(|| space(t))
}

/// [`deepseek3_word`]`| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+`
fn spark(t: &[Char]) -> Option<usize> {
    deepseek3_word(t)
        .or_else(|| lead_plus(t, is_space, |c| c.is(P | S)))
        .or_else(|| newline(t))
        .or_else(|| space(t))
}

/// Runs of scripts without spaces between words: `[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+`
fn unspaced_scripts(t: &[Char]) -> Option<usize> {
    #[rustfmt::skip]
    const SCRIPTS: &[(u32, u32)] = &[
        (0xe40, 0xeff), (0x1000, 0x109f), (0x1100, 0x11ff), (0x1780, 0x17ff), (0x2f00, 0x2fdf), (0x3040, 0x30ff),
        (0x3400, 0x4dbf), (0x4e00, 0x9fff), (0xa9e0, 0xa9ff), (0xaa60, 0xaa7f), (0xac00, 0xd7af), (0xf900, 0xfaff),
        (0xff65, 0xff9f),
    ];
    plus(t, |c| in_ranges(c, SCRIPTS))
}

/// Chinese characters.
fn is_han(c: Char) -> bool {
    #[rustfmt::skip]
    const HAN: &[(u32, u32)] = &[
        (0x3400, 0x4dbf), (0x4e00, 0x9fff), (0xf900, 0xfaff), (0x20000, 0x2a6df), (0x2a700, 0x2b73f),
        (0x2b740, 0x2b81f), (0x2b820, 0x2ceaf), (0x2ceb0, 0x2ebef), (0x2f800, 0x2fa1f),
    ];
    in_ranges(c, HAN)
}

/// `[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{L}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}|
/// ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
fn kimi(t: &[Char]) -> Option<usize> {
    let letters = || {
        let lead = |c: Char| !is_newline(c) && !c.is(L | N);
        let n = lead_plus(t, lead, |c| c.is(L) && !is_han(c))?;
        let rest = &t[n..];
        Some(
            n + if rest.is_empty() {
                None
            } else {
                any_contraction(rest)
            }
            .unwrap_or(0),
        )
    };
    plus(t, is_han)
        .or_else(letters)
        .or_else(|| number_1_3(t))
        .or_else(|| other_newlines(t))
        .or_else(|| to_last_newline(t))
        .or_else(|| space(t))
}

/// Whether `t` begins with an ASCII text.
fn begins(t: &[Char], text: &str) -> bool {
    t.len() >= text.len() && t.iter().zip(text.bytes()).all(|(c, b)| c.eq(b))
}

/// `<sentinel:[0-9]+>`
fn sentinel(t: &[Char]) -> Option<usize> {
    const START: &str = "<sentinel:";
    let rest = begins(t, START).then(|| &t[START.len()..])?;
    let n = plus(rest, |c| c.ascii().is_some_and(|c| c.is_ascii_digit()))?;
    (rest.get(n)?.eq(b'>')).then_some(START.len() + n + 1)
}

/// `IMGIMG[A-I]{1,4}Z`
fn image_tokens(t: &[Char]) -> Option<usize> {
    const START: &str = "IMGIMG";
    let rest = begins(t, START).then(|| &t[START.len()..])?;
    let n = plus(&rest[..rest.len().min(4)], |c| {
        c.ascii().is_some_and(|c| (b'A'..=b'I').contains(&c))
    })?;
    (rest.get(n)?.eq(b'Z')).then_some(START.len() + n + 1)
}

/// `[\t\n]|    |  `
fn single_spaces(t: &[Char]) -> Option<usize> {
    if t[0].eq(b'\t') || t[0].eq(b'\n') {
        return Some(1);
    }
    let n = star(&t[..t.len().min(4)], is_space);
    [4, 2].into_iter().find(|&size| size <= n)
}

/// ``[\p{P}!-/:-@\[-`{-~]``
fn mark(t: &[Char]) -> Option<usize> {
    let is_mark = t[0].is(P) || t[0].ascii().is_some_and(|c| c.is_ascii_punctuation());
    is_mark.then_some(1)
}

/// Runs without white space, which is dropped.
fn words(t: &[Char], piece: Sink<'_>) {
    t.split(|c| c.is(WS))
        .filter(|word| !word.is_empty())
        .for_each(piece);
}

/// ` ?[^(\s|.,!?…。，、।۔،)]+`
fn bloom(t: &[Char]) -> Option<usize> {
    #[rustfmt::skip]
    const ENDS: [u32; 14] = [
        0x28, 0x29, 0x7c, 0x2e, 0x2c, 0x21, 0x3f, 0x2026, 0x3002, 0xff0c, 0x3001, 0x964, 0x6d4, 0x60c,
    ];
    lead_plus(t, is_space, |c| !c.is(WS) && !ENDS.contains(&c.cp()))
}

/// `\d{1,3}(?=(?:\d{3})*\b)`: runs of `\p{N}` in groups of three, counted from the right. As in
/// llama.cpp a piece ends after each group, but the text before a run is in one piece with its
/// first group.
fn digit_groups(t: &[Char], piece: Sink<'_>) {
    let (mut start, mut at) = (0, 0);
    while at < t.len() {
        at += star(&t[at..], |c| !c.is(N));
        let end = at + star(&t[at..], |c| c.is(N));
        while at < end {
            at += 1 + (end - at - 1) % 3;
            piece(&t[start..at]);
            start = at;
        }
    }
    piece(&t[start..]);
}

/// `(?=(\d{3})+(?!\d))`: a cut before each group of three ASCII digits, counted from the right.
fn ascii_digit_groups(t: &[Char], piece: Sink<'_>) {
    let digit = |c: Char| c.ascii().is_some_and(|c| c.is_ascii_digit());
    let (mut start, mut at) = (0, 0);
    while at < t.len() {
        at += star(&t[at..], |c| !digit(c));
        let end = at + star(&t[at..], digit);
        at += (end - at) % 3;
        while at < end {
            piece(&t[start..at]);
            start = at;
            at += 3;
        }
    }
    piece(&t[start..]);
}
#[cfg(test)]
mod tests {
    use crate::tokenizer::split::*;
    use crate::tokenizer::unicode::chars;

    fn words(pre: &str, text: &str) -> Vec<String> {
        let mut words = Vec::new();
        let mut push = |w: &[Char]| {
            words.push(String::from_utf8(w.iter().flat_map(|c| c.utf8()).collect()).unwrap())
        };
        PreTokenizer::by_name(pre)
            .unwrap()
            .split(&chars(text.as_bytes()), &mut push);
        words
    }

    /// Texts that distinguish the patterns, cut as llama.cpp does, and for `gpt-4o` and `tekken` as
    /// tiktoken does with the published patterns.
    #[test]
    fn patterns_cut_like_the_references() {
        #[rustfmt::skip]
        let cases: &[(&str, &[&str])] = &[
            ("llama-bpe", &["I", "'LL", " it", "'s", "  \n\n", " x", " ", "123", "45", " a", "-b", "!!\n", " (", "Foo", ")", "  "]),
            ("gpt-2", &["I", "'", "LL", " it", "'s", "  \n\n", " x", " 12345", " a", "-", "b", "!!", "\n", " (", "Foo", ")", "  "]),
            ("qwen2", &["a", "1", "b", "2", "2", " '", "Tis", " ", " e", "\u{301}a", "\t", "\tx", "\r\n", " y"]),
            ("qwen35", &["a", "1", "b", "2", "2", " '", "Tis", " ", " e\u{301}a\u{301}", " \u{301}"]),
            ("ufakzeka", &["Ankara", "'da", " it", "'s"]),
            ("laguna", &["a", " ", "\n\n", " b"]),
            ("seed-coder", &["a", "!!", "\n\n", " b"]),
            ("minicpm5", &["123", "4", " a", "12"]),
            ("jais-2", &["    ", "  ", " x", "   \t", "\t\t", "\t"]),
            ("exaone-moe", &["ab cd ef", " ", " gh", " ", "1", "/", "2", "/\n"]),
            ("falcon", &["a", "123", "4", " ", "<", "b", ">`", "c", "`", " x", "--", "y"]),
            ("default", &["a", "123", "4", " ", "<", "b", ">", "`", "c", "`", " x", "--", "y"]),
            ("starcoder", &["a", " ", "1", "2", " b"]),
            ("deepseek-llm", &["H", "é", " ", "中文", "abc", " ", "12", "中", " ！？", "、", "a", "!", "b", " ", "\n", "\n", "  "]),
            ("deepseek-coder", &["Hé", " ", "中文", "abc", " ", "1", "2", "中", " ！？", "、", "a", "!", "b", " ", "\n", "\n", "  "]),
            ("deepseek-v3", &["#include", " <", "a", ">", " ", "かな漢字", " ", "123", "4", ".", "5", " \u{301}x", " _", "foo", "!!\n\n", " ", " b"]),
            ("spark2_5", &["#include", " ", "1", "2", "3", "4", "5", "!!", "\n", "\n", " \n", " b"]),
            ("gpt-4o", &["Hello", "World", " ÉCOLE", " é", "Cole", " ABCdef", " हिन्दी", " e\u{301}", " ǅabc", " ΑΒγ", " I'm", " US'ſ", " ", "123", "45", " a", "/b", "/\n/", " x"]),
            ("tekken", &["Hello", "World", " ÉCOLE", " ABCdef", " हिन्दी", " I", "'m", " ", "1", "2", "3"]),
            ("granite-embed-multi-97m", &["He", "LLo", " क\u{93f}त\u{93e}", " e\u{301}", "X"]),
            ("tiny_aya", &["x", " ", "1", "234", "567", " Ab\u{301}C's", " ", "12"]),
            ("youtu", &["안녕", "abc", "「", "漢字", "」", " ", "ㄅㄆ", " ", "1", "2", "…", "Ab's"]),
            ("superbpe", &["by ", "1", "234", "567", " a b"]),
            ("bloom", &["a", ",", " b", " (", "c", ")", " d", "|", "e", " …", " f"]),
            ("viking", &["a", "1", "2", ",", " b"]),
            ("gemma4", &["a b", "\n\n\n", "c"]),
        ];
        for (pre, want) in cases {
            assert_eq!(words(pre, &want.concat()), *want, "{pre}");
        }
    }

    #[test]
    fn names_are_unambiguous() {
        let mut names: Vec<&str> = PRE_TOKENIZERS
            .iter()
            .flat_map(|p| p.names)
            .copied()
            .collect();
        let n = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), n);
    }
}
