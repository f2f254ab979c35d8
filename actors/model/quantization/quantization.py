"""How a model's weights are quantized, product by product."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

from pagebus.actors.model.errors import ModelError
from pagebus.actors.model.family import NameMap
from pagebus.actors.model.quantization.scheme import Rule, Scheme, mixed

FUSED = (
    ((".q_proj", ".k_proj", ".v_proj"), ".qkv_proj"),
    ((".gate_proj", ".up_proj"), ".gate_up_proj"),
    ((".w1", ".w3"), ".w13"),
)
"""Entries may mean the fused product, as other servers have it."""
HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class Quantization:
    """The first of ``rules`` that means a module says what its weight is; others have ``default`` (None: they are not
    quantized). The head and routers are not, unless ``head`` says so of the former: then it is read so, and becomes 16
    bits. ``online``: the checkpoint is not quantized, and its weights become so while they are loaded. ``exact`` says
    it of each module that there is, by our names, in place of rules; parts of one product may then differ."""

    method: str
    default: Scheme | None
    rules: tuple[Rule, ...] = ()
    head: bool = False
    online: bool = False
    exact: Mapping[str, Scheme | None] | None = None

    def scheme(self, names: Sequence[str]) -> Scheme | None:
        """Of the module that is called by these ``names``."""
        if self.exact is not None:
            return next((self.exact[name] for name in names if name in self.exact), None)
        rule = next((rule for rule in self.rules if means(rule, names)), None)
        return self.default if rule is None else rule.scheme

    def agreed(self, modules: Sequence[str], names: NameMap) -> Scheme | None:
        """The one scheme of ``modules``, which are one product here. Raises ModelError if they differ."""
        if self.exact is not None:
            return together([self.exact[module] for module in modules if module in self.exact])
        found = {module: self.scheme(all_names(module, names)) for module in modules}
        (first, scheme), *others = found.items()
        for module, other in others:
            if other != scheme:
                raise ModelError(
                    f"{first} and {module} are one product here, but are quantized in two ways: "
                    f"{scheme or 'not at all'}, and {other or 'not at all'}"
                )
        return scheme

    def unmatched(self, modules: Iterable[str], names: NameMap) -> list[str]:
        """Entries that mean none of ``modules``: perhaps misspelt. Those of image towers and of the head are known."""
        known = [all_names(module, names) for module in modules]
        entries = [rule for rule in self.rules if rule.match != "all" and not _known_absent(rule.entry, names)]
        return [rule.entry for rule in entries if not any(means(rule, each) for each in known)]


def together(schemes: Sequence[Scheme | None]) -> Scheme | None:
    """What holds all parts of a product exactly; None if one is not quantized, or there is none."""
    known = [scheme for scheme in schemes if scheme is not None]
    if len(known) < len(schemes) or not known:
        return None
    return known[0] if len(set(known)) == 1 else mixed(known)


def _known_absent(entry: str, names: NameMap) -> bool:
    plain = entry.removeprefix("re:").lstrip("^.*")
    towers = (*names.skip, "vision", "visual", "multi_modal")
    return plain.endswith(HEAD) or HEAD in plain or plain.startswith(towers) or "mtp" in plain


def all_names(module: str, names: NameMap) -> tuple[str, ...]:
    """What ``module``, by our name, is called in checkpoints and by the libraries that wrote them."""
    theirs = [module]
    if module.startswith("model."):
        theirs += [prefix + module.removeprefix("model.") for prefix in names.prefixes]
    for name in tuple(theirs):
        whole = f"{name}."
        theirs += [whole.replace(ours, original)[:-1] for original, ours in names.renamed if ours in whole]
    for name in tuple(theirs):
        theirs += [name.removesuffix(part) + fused for parts, fused in FUSED for part in parts if name.endswith(part)]
    return tuple(dict.fromkeys(theirs))


def means(rule: Rule, names: Sequence[str]) -> bool:
    """Whether ``rule`` is about the module with these names."""
    match, entry = rule.match, rule.entry
    if match == "all":
        return True
    if match == "name":
        return entry in names
    if match == "within":
        return any(entry in name for name in names)
    if match == "glob":
        return any(fnmatchcase(name, entry) or fnmatchcase(name, f"{entry}.*") for name in names)
    if match == "regex":
        return any(expression(entry).match(name) for name in names)
    return any(f".{entry.strip('.')}." in f".{name}." for name in names)


@lru_cache(maxsize=4096)
def expression(text: str) -> re.Pattern[str]:
    """A regular expression of a configuration. Raises ModelError."""
    try:
        return re.compile(text.removeprefix("re:"))
    except re.error as error:
        raise ModelError(f"quantization_config: {text!r} is no regular expression: {error}") from error
