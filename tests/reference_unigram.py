#!/usr/bin/env python3
"""Makes tests/data/unigram.json: small unigram vocabularies, and the ids that SentencePiece computes for hard strings.

    pip install sentencepiece protobuf llama-cpp-python gguf
    python tests/reference_unigram.py

llama.cpp has to agree. Where it differs by design, `as_llama_cpp`, the ids are its; but in vocabularies with byte tokens,
which it does not use, unknown characters are SentencePiece's bytes.
"""

import io
import json
import os
import pathlib
import tempfile

import gguf
import llama_cpp
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

DATA = pathlib.Path(__file__).parent / "data"


def as_llama_cpp(text):
    """Spaces put before a text, or not: around tokens that users define, and before one of nothing but spaces."""
    return "<user>" in text or not text.strip("▁ \n\u00a0\u3000")


# Replacements as SentencePiece compiles them: code points, a tab, code points. Of Unicode's some, and some that overlap.
RULES = {
    "\t": " ", "\n": " ", "\u00a0": " ", "\u3000": " ", "\u200b": "", "\u00ad": "",
    "ﬁ": "fi", "ﬀ": "ff", "½": "1⁄2", "①": "1", "ｱ": "ア", "ｶ": "カ", "ｶﾞ": "ガ", "㌔": "キロ", "Ａ": "A", "ａ": "a", "２": "2",
    "e\u0301": "é", "a\u0308": "ä", "a\u0308\u0301": "ä́", "ﷺ": "صلى الله عليه وسلم", "…": "...",
}  # fmt: skip

TEXTS = [
    "", " ", "   ", "a", " a", "a ", "  a  b  ", "a\tb\nc", "\n\n", "The river rose by two hands in the night.",
    "the the  the   the", "ﬁﬀ ½ ①", "ｱｶｶﾞ㌔", "Ａａ２", "e\u0301 a\u0308\u0301 a\u0308 a", "ﷺ", "zero\u200bwidth soft\u00adhyphen",
    "日本語のテスト 漢字", "Ünïcödé déjà vu", "한국어", "emoji 🙂🙃 👩‍👩‍👧", "mixed漢字and語words", "…", "x…y", "１２３", "12345 67.89",
    "<user> tag", "a<user>b", " <user> ", "<user><user>", "no▁escape", "▁", "▁▁a", "\u00a0\u3000", "tab\tand\u00a0nbsp",
    "supercalifragilisticexpialidocious", "aaaaaaaaaaaaaaaaaaaaaaaa", "'quoted' \"double\" (round) [square]", "naïve café coöperate",
    "в начале было слово", "مرحبا بالعالم", "\U0001F1E9\U0001F1EA", "end with space ", "\u0301", "ﬁ\u0301",
]  # fmt: skip

# What SentencePiece is told, and whether that makes another vocabulary.
VARIANTS = {
    "plain": {},
    "spaces": {"remove_extra_whitespaces": False},
    "identity": {"normalization_rule_name": "identity", "add_dummy_prefix": True},
    "no-prefix": {"add_dummy_prefix": False, "remove_extra_whitespaces": False},
    "phrases": {"split_by_whitespace": False},
    "bytes": {"byte_fallback": True},
}


def train(options):
    sentences = (DATA / "river-station.txt").read_text().splitlines()[:400]
    sentences += ["naïve café déjà vu", "в начале было слово и слово было", "カタカナ テスト ガ キロ", "صلى الله عليه وسلم مرحبا"] * 3
    model = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder:
        rules = os.path.join(folder, "rules.tsv")
        points = lambda text: " ".join(f"{ord(c):X}" for c in text)
        pathlib.Path(rules).write_text("".join(f"{points(a)}\t{points(b)}\n" for a, b in RULES.items()))
        if "normalization_rule_name" not in options:
            options = {**options, "normalization_rule_tsv": rules}
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences), model_writer=model, model_type="unigram", vocab_size=400,
            user_defined_symbols=["<user>"], control_symbols=["<ctl>"], pad_id=0, eos_id=1, unk_id=2, bos_id=-1,
            hard_vocab_limit=False, num_threads=1, minloglevel=2, **options,
        )  # fmt: skip
    return model.getvalue()


def of_llama_cpp(metadata):
    """Its ids of all texts."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "vocab.gguf")
        w = gguf.GGUFWriter(path, "t5")
        w.add_tokenizer_model("t5")
        w.add_tokenizer_pre("default")
        w.add_token_list([text.encode() for text in metadata["tokens"]])
        w.add_token_scores(metadata["scores"])
        w.add_token_types(metadata["types"])
        w.add_add_space_prefix(metadata["add_space_prefix"])
        w.add_remove_extra_whitespaces(metadata["remove_extra_whitespaces"])
        if metadata["charsmap"]:
            w.add_precompiled_charsmap(bytes.fromhex(metadata["charsmap"]))
        w.add_pad_token_id(0)
        w.add_eos_token_id(1)
        w.add_unk_token_id(2)
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.close()
        model = llama_cpp.Llama(path, vocab_only=True, verbose=False)
        return [model.tokenize(text.encode(), add_bos=False, special=False) for text in TEXTS]


def main():
    lines = []
    for name, options in VARIANTS.items():
        serialised = train(options)
        proto = sentencepiece_model_pb2.ModelProto.FromString(serialised)
        processor = sentencepiece.SentencePieceProcessor(model_proto=serialised)
        spec = proto.normalizer_spec
        metadata = {
            "name": name,
            "tokens": [piece.piece for piece in proto.pieces],
            "scores": [piece.score for piece in proto.pieces],
            # GGUF's numbers of the types are SentencePiece's.
            "types": [piece.type for piece in proto.pieces],
            "charsmap": spec.precompiled_charsmap.hex(),
            "add_space_prefix": spec.add_dummy_prefix,
            "remove_extra_whitespaces": spec.remove_extra_whitespaces,
        }
        ids = [processor.encode(text) for text in TEXTS]
        theirs = of_llama_cpp(metadata)
        different = [text for text, a, b in zip(TEXTS, ids, theirs) if a != b and not as_llama_cpp(text)]
        print(f"{name}: {len(proto.pieces)} tokens, {len(spec.precompiled_charsmap)} bytes; llama.cpp differs in {different}")
        assert not different or options.get("byte_fallback")
        cases = [[text, b if as_llama_cpp(text) else a] for text, a, b in zip(TEXTS, ids, theirs)]
        lines.append(json.dumps({**metadata, "cases": cases}, ensure_ascii=False, separators=(",", ":")))
    (DATA / "unigram.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
