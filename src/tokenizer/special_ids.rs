//! Kinds of tokenizer models, and the special tokens that a file names or that are known by their
//! texts.

use crate::gguf::Metadata;
use crate::tokenizer::TokenizerError;
use crate::tokenizer::split::PreTokenizer;
use crate::tokenizer::vocab::Vocab;
use std::collections::BTreeSet;

/// Texts of tokens that end a turn, most specific first: the end-of-turn token is the first of them
/// in the vocabulary, if the file does not name one.
const END_OF_TURN: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
];

/// Texts of other tokens that end the generation.
const END_OF_GENERATION: &[&str] = &[
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "</s>",
    "<|eom_id|>",
    "[EOS]",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "[e~[",
];

/// Fill-in-the-middle tokens: the keys that name them, the texts that identify them otherwise, and whether they end the
/// generation.
#[rustfmt::skip]
const FILL_IN_THE_MIDDLE: [(&[&str], &[&str], bool); 6] = [
    (&["tokenizer.ggml.fim_pre_token_id", "tokenizer.ggml.prefix_token_id"],
     &["<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>", "<|prefix|>"], false),
    (&["tokenizer.ggml.fim_suf_token_id", "tokenizer.ggml.suffix_token_id"],
     &["<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>", "<|suffix|>"], false),
    (&["tokenizer.ggml.fim_mid_token_id", "tokenizer.ggml.middle_token_id"],
     &["<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>", "<|middle|>"], false),
    (&["tokenizer.ggml.fim_pad_token_id"], &["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"], true),
    (&["tokenizer.ggml.fim_rep_token_id"], &["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"], true),
    (&["tokenizer.ggml.fim_sep_token_id"], &["<|file_sep|>"], true),
];

pub(super) const BOS: &str = "tokenizer.ggml.bos_token_id";
pub(super) const EOS: &str = "tokenizer.ggml.eos_token_id";

/// The kind of model, by its name in the file.
pub(super) struct Kind<'m> {
    pub(super) name: &'m str,
    /// Pre-tokeniser of byte-level BPE.
    pub(super) pre_name: Option<&'m str>,
    pub(super) pre: Option<&'static PreTokenizer>,
}

impl<'m> Kind<'m> {
    pub(super) fn of(m: &'m Metadata) -> Result<Kind<'m>, TokenizerError> {
        let name = m.str("tokenizer.ggml.model")?;
        let pre_name = m
            .opt_str("tokenizer.ggml.pre")?
            .filter(|pre| !pre.is_empty());
        let pre_name = match name {
            "llama" => None,
            "gpt2" => Some(pre_name.unwrap_or("default")),
            "whitespace" => Some("whitespace"),
            "gemma4" => Some("gemma4"),
            // WordPiece has a single pre-tokeniser, the others have none.
            "bert" | "t5" | "rwkv" | "plamo2" => None,
            _ => {
                return Err(TokenizerError::Model {
                    name: name.to_owned(),
                });
            }
        };
        let pre = pre_name.map(PreTokenizer::by_name).transpose()?;
        Ok(Kind {
            name,
            pre_name,
            pre,
        })
    }

    pub(super) fn is(&self, name: &str) -> bool {
        self.name == name
    }

    pub(super) fn is_bert(&self) -> bool {
        self.is("bert")
    }

    pub(super) fn is_unigram(&self) -> bool {
        self.is("t5")
    }

    pub(super) fn is_plamo2(&self) -> bool {
        self.is("plamo2")
    }

    /// Whether texts begin with a token of their own, unless the file says otherwise; of
    /// vocabularies without a pre-tokeniser.
    pub(super) fn begins_texts(&self) -> bool {
        !(self.is_rwkv() || self.is_unigram() || self.is_plamo2())
    }

    pub(super) fn is_rwkv(&self) -> bool {
        self.is("rwkv")
    }
}

/// Numbers of special tokens.
pub(super) struct SpecialIds {
    pub(super) bos: Option<u32>,
    pub(super) eos: Option<u32>,
    pub(super) eot: Option<u32>,
    pub(super) eom: Option<u32>,
    pub(super) unknown: Option<u32>,
    pub(super) separator: Option<u32>,
}

/// Numbers of the tokens of [`FILL_IN_THE_MIDDLE`].
pub(super) type FillInTheMiddleIds = [Option<u32>; FILL_IN_THE_MIDDLE.len()];

impl SpecialIds {
    /// Special tokens, those of fill-in-the-middle, and those that end the generation; makes those
    /// that are known by their texts control tokens.
    pub(super) fn read(
        m: &Metadata,
        kind: &Kind<'_>,
        vocab: &mut Vocab,
    ) -> Result<(SpecialIds, FillInTheMiddleIds, BTreeSet<u32>), TokenizerError> {
        let (n_vocab, is_bert) = (vocab.len(), kind.is_bert());
        // Writers use 2^32 - 1 for "no such token".
        let id_at = |key: &'static str| match m.opt_u32(key)? {
            None | Some(u32::MAX) => Ok(None),
            Some(id) if (id as usize) < n_vocab => Ok(Some(id)),
            Some(id) => Err(TokenizerError::SpecialId { key, id, n_vocab }),
        };
        let inside = |id: Option<u32>| id.filter(|&id| (id as usize) < n_vocab);
        let (bos, eos, unknown) = match kind.pre {
            None if is_bert => (Some(101), None, Some(100)),
            None if kind.is_unigram() => (None, Some(1), Some(2)),
            None if kind.is_rwkv() => (None, None, None),
            None => (Some(1), Some(2), Some(0)),
            Some(pre) => (pre.default_bos, pre.default_eos, None),
        };
        let bos = id_at(BOS)?.or(inside(bos));
        let eos = id_at(EOS)?.or(inside(eos));
        // BERT's texts end with the separator token.
        let separator =
            id_at("tokenizer.ggml.seperator_token_id")?.or(inside(Some(102)).filter(|_| is_bert));
        let eos = if is_bert { separator.or(eos) } else { eos };
        let unknown = id_at("tokenizer.ggml.unknown_token_id")?.or(inside(unknown));
        let eot = id_at("tokenizer.ggml.eot_token_id")?;
        let eom = id_at("tokenizer.ggml.eom_token_id")?;

        let eot = eot.or_else(|| vocab.find_control(END_OF_TURN));
        let eom = eom.or_else(|| vocab.find_control(&["<|eom_id|>"]));
        let mut eog: BTreeSet<u32> = [eos, eot, eom].into_iter().flatten().collect();
        let mut fill_in_the_middle = [None; FILL_IN_THE_MIDDLE.len()];
        for (&(keys, texts, ends), found) in FILL_IN_THE_MIDDLE.iter().zip(&mut fill_in_the_middle)
        {
            let mut named = None;
            for key in keys {
                named = id_at(key)?.or(named);
            }
            let id = named.or_else(|| vocab.find_control(texts));
            eog.extend(id.filter(|_| ends));
            *found = id;
        }
        for text in END_OF_TURN.iter().chain(END_OF_GENERATION) {
            eog.extend(vocab.find_control(&[text]));
        }
        let ids = SpecialIds {
            bos,
            eos,
            eot,
            eom,
            unknown,
            separator,
        };
        Ok((ids, fill_in_the_middle, eog))
    }
}
