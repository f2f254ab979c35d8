"""Tiny tokenizers of the kind that each family has: its class, its special tokens, and its form of chat.

Templates are written from the forms that families document; they are shorter than those of the hub, but place the same
tokens at the same places.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.helpers.tokenizer_factory import CORPUS, model_folder

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How tiktoken's newer vocabularies cut text into words."""


def byte_level(special: tuple[str, ...], split: str | None = None) -> Tokenizer:
    """Byte-level BPE; ``split`` is the words' regular expression, None: GPT-2's own."""
    tokenizer = Tokenizer(models.BPE())
    own = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    cut = [] if split is None else [pre_tokenizers.Split(Regex(split), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cut, own]) if cut else own
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(each, normalized=False, special=True) for each in special])
    return tokenizer


def pieces(special: tuple[str, ...], *, in_front: bool) -> Tokenizer:
    """SentencePiece's BPE with bytes for what it lacks; ``in_front``: a text begins with a space."""
    letters = sorted({c for text in CORPUS for c in text if c.isascii() and c not in " \n\t"} | {"▁"})
    control = [each for each in ("<pad>", "<unk>", "<s>", "</s>", "<bos>", "<eos>") if each in special]
    words = ["▁t", "he", "▁the", "ld", "▁▁", "qu", "\n"]
    tokens = [*control, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *words]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("l", "d"), ("▁", "▁"), ("q", "u")]
    vocab = {token: place for place, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if in_front else spaces
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if in_front else steps)
    tokenizer.add_special_tokens([AddedToken(each, normalized=False, special=True) for each in special])
    return tokenizer


def unigram(special: tuple[str, ...]) -> Tokenizer:
    """XLM-R's: SentencePiece's unigrams."""
    letters = sorted({c for text in CORPUS for c in text if c != " "} | {"▁"})
    words = [*special, *letters, "▁the", "▁wor", "ld"]
    found = dict.fromkeys(words)
    tokenizer = Tokenizer(models.Unigram([(word, -float(place)) for place, word in enumerate(found)], unk_id=3))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(each, normalized=False, special=True) for each in special])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return tokenizer


def word_pieces(special: tuple[str, ...]) -> Tokenizer:
    """BERT's."""
    letters = sorted({c for text in CORPUS for c in text.lower() if c.isascii() and not c.isspace()})
    words = [*special, *letters, *(f"##{letter}" for letter in letters), "the", "hello", "wor", "##ld"]
    vocab = {word: place for place, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(each, vocab[each]) for each in ("[CLS]", "[SEP]")],
    )  # fmt: skip
    tokenizer.add_special_tokens([AddedToken(each, normalized=False, special=True) for each in special])
    return tokenizer


@dataclass(frozen=True, slots=True)
class FamilyTokenizer:
    """``model_types`` have it; ``template`` is the form of their chats (None: they have none); ``said`` is in
    ``tokenizer_config.json`` beside the class."""

    tokenizer: Tokenizer
    declared: str
    model_types: tuple[str, ...]
    template: str | None
    said: dict[str, Any] = field(default_factory=dict)

    def folder(self, path: Path, model_type: str) -> Path:
        """Its files, for a model of this type."""
        return model_folder(
            path, self.tokenizer, tokenizer_class=self.declared, chat_template=self.template, model_type=model_type,
            tokenizer_config={"bos_token": None, "eos_token": None, **self.said}, vocab_size=1000,
        )  # fmt: skip


def turns(before: str, after: str, prompt: str, start: str = "", role: str = "message.role") -> str:
    """Each message as its role between ``before``, which has {} for it, and its text before ``after``."""
    opened = before.replace("{}", "{{ " + role + " }}")
    text = "{%- for message in messages -%}" + opened + "{{ message.content }}" + after + "{%- endfor -%}"
    return f"{start}{text}{{%- if add_generation_prompt -%}}{prompt}{{%- endif -%}}"


def by_role(user: str, assistant: str, system: str, prompt: str, start: str = "") -> str:
    """Each message by its role's own form, which has {} for the text."""
    forms = {"user": user, "assistant": assistant, "system": system}
    cases = "".join(
        f"{{%- {'if' if role == 'user' else 'elif'} message.role == '{role}' -%}}"
        + form.replace("{}", "{{ message.content }}")
        for role, form in forms.items()
    )
    text = "{%- for message in messages -%}" + cases + "{%- endif -%}{%- endfor -%}"
    return f"{start}{text}{{%- if add_generation_prompt -%}}{prompt}{{%- endif -%}}"


BREAK = "{{ '\\n' }}"
GEMMA_ROLE = "'model' if message.role == 'assistant' else message.role"
IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
IM_TURNS = turns("<|im_start|>{}" + BREAK, "<|im_end|>" + BREAK, "<|im_start|>assistant" + BREAK)
THINK = (
    "{%- if enable_thinking is defined and not enable_thinking -%}<think>"
    + BREAK * 2
    + "</think>"
    + BREAK * 2
    + "{%- endif -%}"
)
LLAMA3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
LLAMA4 = ("<|begin_of_text|>", "<|end_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>")
SP = ("<unk>", "<s>", "</s>")
GEMMA = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
PHI3 = (*SP, "<|endoftext|>", "<|assistant|>", "<|end|>", "<|user|>", "<|system|>")
ROLES = ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>")
GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
COHERE = (
    "<PAD>", "<UNK>", "<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>",
    "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>",
)  # fmt: skip
HARMONY = ("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>")
WIDE = "<\uff5c{}\uff5c>"
DEEPSEEK = tuple(WIDE.format(name) for name in ("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant"))
COHERE_PROMPT = "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
BOS = "{{ bos_token }}"


def _cohere_turn(role: str) -> str:
    return f"<|START_OF_TURN_TOKEN|><|{role}_TOKEN|>{{}}<|END_OF_TURN_TOKEN|>"


TOKENIZERS: dict[str, FamilyTokenizer] = {
    "llama 2": FamilyTokenizer(
        pieces(SP, in_front=True), "LlamaTokenizer", ("llama",),
        by_role("<s>[INST] {} [/INST]", " {} </s>", "<<SYS>>{}<</SYS>>", ""),
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    ),
    "llama 3": FamilyTokenizer(
        byte_level(LLAMA3, SPLIT), "PreTrainedTokenizerFast", ("llama",),
        turns("<|start_header_id|>{}<|end_header_id|>" + BREAK * 2, "<|eot_id|>",
              "<|start_header_id|>assistant<|end_header_id|>" + BREAK * 2, BOS),
        {"bos_token": LLAMA3[0], "eos_token": LLAMA3[4]},
    ),
    "llama 4": FamilyTokenizer(
        byte_level(LLAMA4, SPLIT), "PreTrainedTokenizerFast", ("llama4_text",),
        turns("<|header_start|>{}<|header_end|>" + BREAK * 2, "<|eot|>",
              "<|header_start|>assistant<|header_end|>" + BREAK * 2, BOS),
        {"bos_token": LLAMA4[0], "eos_token": LLAMA4[4]},
    ),
    "mistral": FamilyTokenizer(
        pieces((*SP, "[INST]", "[/INST]"), in_front=True), "LlamaTokenizer", ("mistral", "mixtral"),
        by_role("[INST] {} [/INST]", " {}</s>", "[INST] {} [/INST]", "", BOS),
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    ),
    "tekken": FamilyTokenizer(
        byte_level((*SP, "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"), SPLIT), "PreTrainedTokenizerFast",
        ("mistral", "ministral", "ministral3", "mistral4"),
        by_role("[INST]{}[/INST]", "{}</s>", "[SYSTEM_PROMPT]{}[/SYSTEM_PROMPT]", "", BOS),
        {"bos_token": "<s>", "eos_token": "</s>"},
    ),
    "qwen": FamilyTokenizer(
        byte_level((*IM, "<think>", "</think>"), SPLIT), "Qwen2Tokenizer", ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe"),
        turns("<|im_start|>{}" + BREAK, "<|im_end|>" + BREAK, "<|im_start|>assistant" + BREAK + THINK),
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    ),
    "smollm3": FamilyTokenizer(
        byte_level(IM, SPLIT), "PreTrainedTokenizerFast", ("smollm3",), IM_TURNS, {"eos_token": "<|im_end|>"}
    ),
    "gemma": FamilyTokenizer(
        pieces(GEMMA, in_front=False), "GemmaTokenizer", ("gemma", "gemma2", "gemma3_text"),
        turns("<start_of_turn>{}" + BREAK, "<end_of_turn>" + BREAK, "<start_of_turn>model" + BREAK, BOS, GEMMA_ROLE),
        {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"},
    ),
    "phi 3": FamilyTokenizer(
        pieces(PHI3, in_front=True), "LlamaTokenizer", ("phi3",),
        turns("<|{}|>" + BREAK, "<|end|>" + BREAK, "<|assistant|>" + BREAK),
        {"bos_token": "<s>", "eos_token": "<|endoftext|>", "unk_token": "<unk>"},
    ),
    "phi 4": FamilyTokenizer(
        byte_level((*IM, "<|im_sep|>"), SPLIT), "GPT2Tokenizer", ("phi3",),
        turns("<|im_start|>{}<|im_sep|>", "<|im_end|>", "<|im_start|>assistant<|im_sep|>"), {"eos_token": "<|im_end|>"},
    ),
    "granite": FamilyTokenizer(
        byte_level(ROLES), "GPT2Tokenizer", ("granite", "granitemoe", "granitemoeshared"),
        turns("<|start_of_role|>{}<|end_of_role|>", "<|end_of_text|>" + BREAK,
              "<|start_of_role|>assistant<|end_of_role|>"),
        {"bos_token": ROLES[0], "eos_token": ROLES[0], "unk_token": ROLES[0], "add_prefix_space": False},
    ),
    "olmo": FamilyTokenizer(
        byte_level(("<|endoftext|>",), SPLIT), "GPT2Tokenizer", ("olmo2", "olmo3"),
        turns("<|{}|>" + BREAK, BREAK, "<|assistant|>" + BREAK, BOS),
        {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"},
    ),
    "glm": FamilyTokenizer(
        byte_level(GLM, SPLIT), "PreTrainedTokenizerFast", ("glm", "glm4", "glm4_moe", "glm4_moe_lite"),
        turns("<|{}|>" + BREAK, "", "<|assistant|>", "[gMASK]<sop>"), {"eos_token": "<|endoftext|>"},
    ),
    "command r": FamilyTokenizer(
        byte_level(COHERE), "CohereTokenizer", ("cohere", "cohere2"),
        by_role(_cohere_turn("USER"), _cohere_turn("CHATBOT"), _cohere_turn("SYSTEM"), COHERE_PROMPT, BOS),
        {"bos_token": COHERE[2], "eos_token": COHERE[4], "unk_token": "<UNK>", "pad_token": "<PAD>"},
    ),
    "starcoder": FamilyTokenizer(
        byte_level(("<|endoftext|>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>")), "GPT2Tokenizer",
        ("starcoder2",), None,
        {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"},
    ),
    "internlm": FamilyTokenizer(
        pieces((*SP, "<|im_start|>", "<|im_end|>"), in_front=False), "InternLM2Tokenizer", ("internlm2", "internlm3"),
        BOS + IM_TURNS,
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
         "auto_map": {"AutoTokenizer": ["tokenization_internlm2.InternLM2Tokenizer", None]}},
    ),
    "minicpm": FamilyTokenizer(
        pieces((*SP, "<|im_start|>", "<|im_end|>"), in_front=True), "LlamaTokenizer", ("minicpm3",), IM_TURNS,
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    ),
    "harmony": FamilyTokenizer(
        byte_level(HARMONY, SPLIT), "PreTrainedTokenizerFast", ("gpt_oss",),
        turns("<|start|>{}<|message|>", "<|end|>", "<|start|>assistant"), {"eos_token": "<|return|>"},
    ),
    "deepseek": FamilyTokenizer(
        byte_level(DEEPSEEK, SPLIT), "LlamaTokenizerFast", ("deepseek_v2", "deepseek_v3", "kimi_k2"),
        by_role(DEEPSEEK[2] + "{}", DEEPSEEK[3] + "{}" + DEEPSEEK[1], "{}", DEEPSEEK[3], BOS),
        {"bos_token": DEEPSEEK[0], "eos_token": DEEPSEEK[1]},
    ),
    "bert": FamilyTokenizer(
        word_pieces(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")), "BertTokenizer", ("bert",), None,
        {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]"},
    ),
    "xlm-r": FamilyTokenizer(
        unigram(("<s>", "<pad>", "</s>", "<unk>", "<mask>")), "XLMRobertaTokenizer", ("xlm-roberta",), None,
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "cls_token": "<s>"},
    ),
}  # fmt: skip
