"""Cut a model into blocks: what comes before the repeated modules, each repeated module, what comes after.

Only the module tree is read, never a weight's data, so models on the meta device and models whose parameters
`deepspeed.zero.Init` has already partitioned work alike.

Note [How blocks are found]
A *list* is an `nn.ModuleList`, `nn.ModuleDict` or `nn.Sequential`. Walking from the root, the outermost list that holds
at least two distinct composite modules of one type is a family, and its elements are blocks; we do not look inside a
block. A list that cannot be called (a `ModuleList` in a `ModuleList`) is a list position, not a block. Where no list
qualifies, same-typed siblings held as plain attributes (`self.block1`, `self.block2`) are taken. The largest family by
parameters always counts; another one counts when it has at least 1 % of the largest one's parameters, so an encoder
and a decoder do while a list of adapters does not. Experts of a mixture are never blocks: they are inside one.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from lazytrain_ds.errors import ConfigError, UnsupportedError
from lazytrain_ds.workload.signature import class_names, parameter_numel, parameter_shape

BlockKind = Literal["embedding", "block", "rest", "head", "whole"]

LIST_TYPES = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
UNCALLABLE_TYPES = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
SMALLEST_FAMILY_SHARE = 0.01


@dataclass(frozen=True)
class Block:
    """One unit of placement: its parameters are fetched, released and updated together.

    `modules`: for kind `block` the one module whose forward is the block (`("",)`, the root, for kind `whole`); for
    `embedding`, `rest` and `head` the outermost modules of the group, whose forwards run one by one, so that such a
    block cannot be recomputed as a unit. `parameters`: names of the parameters it owns; every parameter of the model
    is owned by exactly one block, a tied one by the first block that has it. `borrows`: (name, index of the owner) of
    tied parameters that an earlier block owns. `family`: which list a block came from; only blocks of one family may
    follow one another directly (-1 for groups).
    """

    index: int
    name: str
    kind: BlockKind
    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    class_name: str
    borrows: tuple[tuple[str, int], ...] = ()
    family: int = -1


@dataclass(frozen=True)
class BlockTable:
    """All blocks in forward order."""

    blocks: tuple[Block, ...]

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self.blocks)

    def __getitem__(self, index: int) -> Block:
        return self.blocks[index]

    @property
    def repeated(self) -> tuple[Block, ...]:
        """The blocks that are one callable module each (kinds `block` and `whole`)."""
        return tuple(block for block in self.blocks if block.kind in ("block", "whole"))

    @property
    def borrows(self) -> tuple[tuple[int, int], ...]:
        """(block, owner) pairs, each once, as `Instance.borrows` wants them."""
        return tuple(sorted({(block.index, owner) for block in self.blocks for _, owner in block.borrows}))

    def owner(self, parameter: str) -> int:
        """Index of the block that owns the parameter of this name; KeyError if there is none."""
        for block in self.blocks:
            if parameter in block.parameters:
                return block.index
        raise KeyError(parameter)

    def classes(self) -> dict[str, Block]:
        """First block of every class, in forward order."""
        first: dict[str, Block] = {}
        for block in self.blocks:
            first.setdefault(block.class_name, block)
        return first


def find_blocks(
    model: nn.Module, pattern: str | Sequence[str] | None = None, *, order: Sequence[str] | None = None
) -> BlockTable:
    """Blocks of `model` in forward order.

    `pattern`: glob(s) on dotted module names that say which modules are the blocks, instead of searching; `*` stands
    for one name component or a part of it, `**` for any number of them (`"model.layers.*"`). `order`: module names in
    the order of their first call (`ForwardTrace.order`); without it registration order is taken as forward order.

    Raises ConfigError when a pattern matches nothing or something that cannot be called, UnsupportedError for a model
    without parameters. The result depends on the module tree alone: the same model gives the same table.
    """
    if next(model.parameters(), None) is None:
        raise UnsupportedError(f"{type(model).__name__} has no parameters: there is nothing to train")
    if pattern is not None and pattern != "auto":
        families = [_matching(model, [pattern] if isinstance(pattern, str) else list(pattern))]
    else:
        families = _search(model)
    if not families or any(module is model for family in families for module in family):
        return _whole(model)
    family_of = {id(module): index for index, family in enumerate(families) for module in family}
    return _table(model, family_of, _ranks(model, order))


# -- searching --


def _size(module: nn.Module) -> int:
    return sum(parameter_numel(parameter) for parameter in module.parameters())


def _is_composite(module: nn.Module) -> bool:
    """Whether a module can be a block: callable, with parameters, and more than one elementary layer."""
    if isinstance(module, UNCALLABLE_TYPES):
        return False
    own = list(module.parameters(recurse=False))
    children = [child for child in module.children() if next(child.parameters(), None) is not None]
    if type(module).__module__.startswith("torch.nn.modules"):
        return len(children) >= 1 and (len(children) >= 2 or len(list(module.parameters())) >= 2)
    # A user's class is composite unless it is a norm or a scale: something with a matrix, or with layers inside.
    return bool(children) or any(len(parameter_shape(parameter)) >= 2 for parameter in own)


def _positions(container: nn.Module) -> list[nn.Module]:
    """Callable elements of a list, a list inside a `ModuleList` being positions of its own."""
    result: list[nn.Module] = []
    for child in container.children():
        if isinstance(child, UNCALLABLE_TYPES):
            result.extend(_positions(child))
        else:
            result.append(child)
    return result


def _family(elements: list[nn.Module], *, keep_lone_ends: bool) -> list[nn.Module]:
    """The blocks among the elements of one list, or nothing.

    At least two must be of one type. Others between them are blocks too; at the ends of a `Sequential` a lone type is
    an embedding or a head, in a `ModuleList` it is a block (a dense layer before mixture layers).
    """
    composite = [_is_composite(element) for element in elements]
    counts: dict[type, int] = {}
    for element, good in zip(elements, composite, strict=True):
        if good:
            counts[type(element)] = counts.get(type(element), 0) + 1
    repeated = [
        position
        for position, element in enumerate(elements)
        if composite[position] and counts.get(type(element), 0) >= 2
    ]
    if not repeated:
        return []
    first, last = (0, len(elements) - 1) if keep_lone_ends else (repeated[0], repeated[-1])
    return [elements[position] for position in range(first, last + 1) if composite[position]]


def _list_families(module: nn.Module) -> list[list[nn.Module]]:
    if isinstance(module, LIST_TYPES):
        elements = list(dict.fromkeys(_positions(module)))
        chosen = _family(elements, keep_lone_ends=isinstance(module, nn.ModuleList))
        # A Sequential of Sequentials is a chain of chains: the finer cut is as valid and needs less memory.
        if chosen and not all(isinstance(element, nn.Sequential) and _list_families(element) for element in chosen):
            return [chosen]
    return [family for child in module.children() for family in _list_families(child)]


def _attribute_families(module: nn.Module) -> list[list[nn.Module]]:
    chosen = _family(list(dict.fromkeys(module.children())), keep_lone_ends=False)
    if chosen:
        return [chosen]
    return [family for child in module.children() for family in _attribute_families(child)]


def _search(model: nn.Module) -> list[list[nn.Module]]:
    families = _list_families(model) or _attribute_families(model)
    if not families:
        return []
    merged = _without_repeats(families)
    sizes = [sum(_size(module) for module in family) for family in merged]
    return [
        family for family, size in zip(merged, sizes, strict=True) if size >= SMALLEST_FAMILY_SHARE * max(sizes) > 0
    ]


def _without_repeats(families: list[list[nn.Module]]) -> list[list[nn.Module]]:
    """Drop modules that another family already has (a list registered under two names)."""
    seen: set[int] = set()
    result = []
    for family in families:
        fresh = [module for module in family if id(module) not in seen]
        seen.update(id(module) for module in fresh)
        if fresh:
            result.append(fresh)
    return result


def _matching(model: nn.Module, patterns: list[str]) -> list[nn.Module]:
    chosen: dict[int, nn.Module] = {}
    modules = list(model.named_modules())
    for pattern in patterns:
        hits = [(name, module) for name, module in modules if name and _matches(name.split("."), pattern.split("."))]
        if not hits:
            lists = [name for name, module in modules if isinstance(module, LIST_TYPES) and name]
            hint = ", ".join(f'"{name}.*"' for name in lists[:5]) or "no list of modules; leave it at 'auto'"
            raise ConfigError(f'blocks: "{pattern}" matches no module of {type(model).__name__}; it has {hint}')
        for name, module in hits:
            if isinstance(module, UNCALLABLE_TYPES):
                raise ConfigError(
                    f'blocks: "{pattern}" matches {name}, a {type(module).__name__}, which has no forward; '
                    f'name its elements instead ("{name}.*")'
                )
            chosen[id(module)] = module
    inside = {id(child) for module in chosen.values() for child in module.modules() if child is not module}
    blocks = [
        module for key, module in chosen.items() if key not in inside and next(module.parameters(), None) is not None
    ]
    if not blocks:
        raise ConfigError(f"blocks: none of the modules matching {patterns} has parameters")
    return blocks


def _matches(parts: list[str], pattern: list[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_matches(parts[start:], pattern[1:]) for start in range(len(parts) + 1))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


# -- forward order and ownership --


def _ranks(model: nn.Module, order: Sequence[str] | None) -> dict[int, int]:
    """Position of every module in forward order (by first call where known, else by registration)."""
    named = list(model.named_modules())
    if not order:
        return {id(module): position for position, (_, module) in enumerate(named)}
    first_call: dict[str, int] = {}
    for position, name in enumerate(order):
        first_call.setdefault(name, position)
    ranks: dict[int, int] = {}
    rank = -1
    # A module that was never called (a table read through its weight) goes with its registered neighbour.
    for name, module in named:
        rank = first_call.get(name, rank)
        ranks[id(module)] = rank
    return ranks


@dataclass
class _Draft:
    name: str
    kind: BlockKind
    modules: list[tuple[str, nn.Module]]
    parameters: list[tuple[str, nn.Parameter]]
    family: int


def _table(model: nn.Module, family_of: dict[int, int], ranks: dict[int, int]) -> BlockTable:
    units: list[tuple[int, int, str, nn.Module, bool]] = []
    loose: list[tuple[str, nn.Parameter]] = []
    _collect(model, "", family_of, ranks, units, loose, set())
    units.sort(key=lambda unit: unit[:2])
    block_positions = [position for position, unit in enumerate(units) if unit[4]]
    first, last = block_positions[0], block_positions[-1]
    before = [(name, module) for _, _, name, module, _ in units[:first]]
    after = [(name, module) for _, _, name, module, _ in units[last + 1 :]]
    # Without observed order: an nn.Embedding is the model's entrance even when it is registered last.
    if len(set(ranks.values())) == len(ranks):
        moved = [(name, module) for name, module in after if isinstance(module, nn.Embedding)]
        before += moved
        after = [unit for unit in after if unit not in moved]
    drafts = [_draft("embedding", "embedding", before, loose)]
    between: list[tuple[str, nn.Module]] = []
    for position in range(first, last + 1):
        _, _, name, module, is_block = units[position]
        if not is_block:
            between.append((name, module))
            continue
        if between:
            drafts.append(_draft(between[0][0], "rest", between, []))
            between = []
        drafts.append(_draft(name, "block", [(name, module)], [], family_of[id(module)]))
    drafts.append(_draft("head", "head", after, []))
    return _finish(drafts)


def _collect(
    module: nn.Module,
    name: str,
    family_of: dict[int, int],
    ranks: dict[int, int],
    units: list[tuple[int, int, str, nn.Module, bool]],
    loose: list[tuple[str, nn.Parameter]],
    seen: set[int],
) -> None:
    """Outermost modules that are a block or contain none; parameters of the modules around them go to `loose`."""
    if id(module) in seen:
        return
    seen.add(id(module))
    is_block = id(module) in family_of
    if is_block or not any(id(child) in family_of for child in module.modules()):
        units.append((ranks[id(module)], len(units), name, module, is_block))
        return
    for parameter_name, parameter in module.named_parameters(recurse=False):
        loose.append((f"{name}.{parameter_name}" if name else parameter_name, parameter))
    for child_name, child in module.named_children():
        _collect(child, f"{name}.{child_name}" if name else child_name, family_of, ranks, units, loose, seen)


def _draft(
    name: str,
    kind: BlockKind,
    modules: list[tuple[str, nn.Module]],
    loose: list[tuple[str, nn.Parameter]],
    family: int = -1,
) -> _Draft:
    parameters = list(loose)
    for module_name, module in modules:
        for parameter_name, parameter in module.named_parameters(remove_duplicate=False):
            parameters.append((f"{module_name}.{parameter_name}" if module_name else parameter_name, parameter))
    return _Draft(name, kind, modules, parameters, family)


def _finish(drafts: list[_Draft]) -> BlockTable:
    """Give every parameter its one owner, leave out empty groups, name the classes."""
    owners: dict[int, tuple[str, int]] = {}
    kept: list[tuple[_Draft, tuple[str, ...], tuple[tuple[str, int], ...]]] = []
    for draft in drafts:
        index = len(kept)
        owned: list[str] = []
        borrowed: list[tuple[str, int]] = []
        for name, parameter in draft.parameters:
            if id(parameter) not in owners:
                owners[id(parameter)] = (name, index)
                owned.append(name)
            elif owners[id(parameter)][1] != index and owners[id(parameter)] not in borrowed:
                borrowed.append(owners[id(parameter)])
        if owned or borrowed or draft.kind in ("block", "whole"):
            kept.append((draft, tuple(owned), tuple(borrowed)))
    classes = class_names([(_base_name(draft), draft.modules, owned) for draft, owned, _ in kept])
    return BlockTable(
        tuple(
            Block(
                index=index,
                name=draft.name,
                kind=draft.kind,
                modules=tuple(name for name, _ in draft.modules),
                parameters=owned,
                class_name=classes[index],
                borrows=borrowed,
                family=draft.family,
            )
            for index, (draft, owned, borrowed) in enumerate(kept)
        )
    )


def _base_name(draft: _Draft) -> str:
    return type(draft.modules[0][1]).__name__ if draft.kind in ("block", "whole") else draft.kind


def _whole(model: nn.Module) -> BlockTable:
    return _finish([_draft(type(model).__name__, "whole", [("", model)], [])])
