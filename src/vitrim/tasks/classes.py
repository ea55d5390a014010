"""The classes of a model by name, and which of them the classes of data are: one rule for everything with labels.

A class goes by several names: ImageNet's WordNet ids (n02099601) and synonyms (tench, Tinca tinca), those of other
libraries (crane bird), and what people call their folders. `places_of` finds the model's class of each of the data's,
or refuses: a label that counts for another class makes every score wrong, and nothing else would show it.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from vitrim.data.paths import listed
from vitrim.errors import VitrimError

WORDNET = re.compile(r"(n\d{8})(?!\d)[\s_,.:-]*(.*)")

NUMBERED = re.compile(r"(\d+)[\s_.:-]+(.+)|(.+?)[\s_.:,-]+(\d+)")
"""A name with the number of its class, such as 207_golden_retriever; it counts where that class has the name, too."""

PLACEHOLDER = re.compile(r"LABEL_\d+")
"""The name of a class that transformers writes into a config where it is told none."""

BY_NUMBER = "by_number"
"""Data option: true if labels are the numbers of the model's classes, whatever the names; "names" if the data's names
are these numbers."""

ALIKE = 0.9
"""Share of a model's names that are ImageNet's, in its order, above which its classes are ImageNet's. torchvision's
list has 999 of 1,000."""


@dataclass(frozen=True)
class Name:
    """The names of a class.

    Attributes:
        given: as the library or the data gives it.
        id: its WordNet id.
        whole: its names with all synonyms, separated by commas.
    """

    given: str
    id: str | None
    whole: tuple[str, ...]

    @classmethod
    def of(cls, given: str) -> Name:
        """Read a name that may be a WordNet id, or begin with one.

        Example:
            >>> Name.of("n02099601-golden_retriever")
            Name(given='n02099601-golden_retriever', id='n02099601', whole=('golden_retriever', 'golden retriever'))
        """
        found = WORDNET.fullmatch(given)
        if found is None:
            return cls(given, None, (given,))
        texts = [found[2], _description(found[1])]
        return cls(given, found[1], tuple(text for text in texts if text))

    @property
    def words(self) -> str:
        """The words for people: without its id and without further synonyms of ImageNet's."""
        if self.id is None or not self.whole:
            return self.given
        return self.whole[0].partition(",")[0]

    @property
    def first(self) -> tuple[str, ...]:
        """The whole names, and the first synonym of each."""
        return (*self.whole, *(text.partition(",")[0] for text in self.whole))

    @property
    def parts(self) -> tuple[str, ...]:
        """The whole names, and every synonym."""
        return (*self.whole, *(part for text in self.whole for part in text.split(",")))


Keys = Callable[[Name], Iterable[str | None]]

# From exact to loose: a name that matches exactly must not lose its class to a likeness.
TIERS: tuple[tuple[Keys, Keys], ...] = (
    # 'Cardigan' is a dog of ImageNet and 'cardigan' a garment, but folders may be written as one likes
    (lambda name: (name.given,), lambda name: () if name.id else (name.given,)),
    (lambda name: (name.id,), lambda name: (name.id,)),
    (lambda name: map(spelling, name.whole), lambda name: map(spelling, name.first)),
)
"""Keys that compare the data's names with the model's: the first pair that finds a class decides."""

SYNONYMS: tuple[Keys, Keys] = (
    lambda name: map(spelling, name.parts),
    lambda name: map(spelling, name.parts),
)
"""The last comparison."""


def written(name: str) -> str:
    """A name with single spaces for spaces, commas, _, and - between words; in the one form that Unicode composes.

    Example:
        >>> written("Cardigan_Welsh-corgi, n"), written("at_-5")
        ('Cardigan Welsh corgi n', 'at -5')
    """
    return " ".join(re.sub(r"(?<=[^\W_])-+(?=[^\W_])|[\s,_]+", " ", unicodedata.normalize("NFC", name)).split())


def spelling(name: str) -> str:
    """A name as `written`, in lower case."""
    return written(name).casefold()


# ---- what is known of a model ----------------------------------------------------------------------------------------


def names_of(known: Sequence[str] | None, count: int | None) -> list[Name] | None:
    """The names of a model's ``count`` classes: ``known`` from its library, and ImageNet's if as many and none differ.

    Example:
        >>> names_of(None, 1000)[1]
        Name(given='goldfish', id='n01443537', whole=('goldfish, Carassius auratus',))
    """
    if known is not None and count and len(known) != count:
        known = None  # of an earlier head
    own = None if known is None else [Name.of(name) for name in known]
    imagenet = _imagenet(len(own) if own is not None else count or 0)
    if own is None or imagenet is None:
        return own if imagenet is None else list(imagenet)
    # The same number of classes is no proof: a thousand of other things keep their own names.
    pairs = list(zip(own, imagenet, strict=True))
    if sum(_shares(one, other) for one, other in pairs) < ALIKE * len(pairs):
        return own
    return [Name(one.given, other.id, tuple(dict.fromkeys((*one.whole, *other.whole)))) for one, other in pairs]


def class_names(
    known: Sequence[str] | None, count: int | None, others: Sequence[str] | None = None
) -> list[str] | None:
    """The names of a classifier's classes, for people to read: its own, ImageNet's, or else ``others`` if as many.

    ``known`` are the names that its library gives, ``count`` is the number of its classes, ``others`` are the data's.
    If none of these is ImageNet's, the model's classes are not ImageNet's either. None if they are not known.

    Example:
        >>> class_names(["n02099601", "cat"], 2), class_names(None, 1000)[207], class_names(None, 2)
        (['golden retriever', 'cat'], 'golden retriever', None)
    """
    names = names_of(known, count)
    data = None if others is None else [Name.of(name) for name in others]
    if names is None:
        return None if data is None or len(data) != count else [name.words for name in data]
    if known is None and data is not None and not _numbers(data) and not any(_found(data, names)):
        return None
    return [name.words for name in names]


@cache
def _info(subset: str) -> Any:
    """timm's `ImageNetInfo`, which takes a tenth of a second to read."""
    from timm.data import ImageNetInfo

    return ImageNetInfo(subset)


@cache
def _imagenet(count: int) -> tuple[Name, ...] | None:
    """The classes of the ImageNet with ``count`` of them; None if there is none."""
    from timm.data import infer_imagenet_subset

    # The number of classes tells the list: 1,000, 11,221 or 21,841, and so on.
    subset = infer_imagenet_subset({"num_classes": count})  # timm itself knows no more
    if subset is None:
        return None
    info = _info(subset)
    texts = info.label_descriptions()
    return tuple(
        Name(text.partition(",")[0], wnid, (text,)) for wnid, text in zip(info.label_names(), texts, strict=True)
    )


def _description(wnid: str, *, detailed: bool = False) -> str | None:
    """The synonyms of a WordNet id, or these and its definition; None for an id that is not ImageNet's."""
    info = _info("imagenet-22k")  # all others are parts of it
    try:
        return str(info.label_name_to_description(wnid, detailed=detailed))
    except KeyError:
        return None


def _shares(one: Name, other: Name) -> bool:
    same_id = one.id is not None and one.id == other.id
    return same_id or not set(map(spelling, one.parts)).isdisjoint(map(spelling, other.parts))


# ---- which of them the data's classes are ----------------------------------------------------------------------------


def places_of(
    names: Sequence[str] | None,
    known: Sequence[str] | None,
    count: int | None,
    *,
    by_number: bool | str = False,
    numbered: bool = False,
) -> list[int] | None:
    """The model's class of each of the data's.

    Classes match by the names that their library gives, by WordNet id, or by any synonym, ignoring case, spaces, -, _
    and commas where nothing matches exactly. A name that fits several classes is the one that no other name is.

    Args:
        names: of the data's classes; None if labels are numbers.
        known: of the model's classes, as its library gives them; None if it has none.
        count: the number of the model's classes.
        by_number: True: a label is the number of the model's class, whatever the names. "names": the data's names are
            these.
        numbered: the data has the numbers of a published list with several spellings: names that the model does not
            have match by number, if all others are the model's in the same order.

    Returns:
        One place per name. None if labels are the model's numbers: this was said, or one side has no names and both
            have as many classes.

    Raises:
        VitrimError: only some names, or none, are the model's; a name fits several classes; or it cannot be known which
            they are.

    Example:
        >>> places_of(["goldfish", "Granny_Smith", "n02099601"], None, 1000)
        [1, 948, 207]
        >>> places_of(["n02099601"], None, 1000, by_number=True)
    """
    if not names or by_number is True:
        return None
    data, own = [Name.of(name) for name in names], names_of(known, count)
    if by_number:
        return _numbers_in_names(names, count)
    # Numbers as names say nothing beside a model with names, unless its own are numbers.
    if own is not None and not (_numbers(data) and not _numbers(own)):
        if [name.given for name in data] == [name.given for name in own]:  # torchvision's ImageNet has two maillots
            return list(range(len(own)))
        return _matched(data, own, numbered=numbered)
    count = count or len(names)
    if own is None and all(PLACEHOLDER.fullmatch(name) for name in names):
        return _matched(data, [Name.of(f"LABEL_{number}") for number in range(count)], numbered=numbered)
    if numbered or _in_order(names, count, alone=own is None):
        return None
    if _numbers(data):
        raise VitrimError(
            f"the data's classes are named by numbers ({listed(names)}), which may be the model's classes from 0, the "
            f"devkit's from 1, or labels in the order of text: say which. --data-option {BY_NUMBER}=names: they are "
            f"the numbers of the model's {count} classes, from 0; {BY_NUMBER}=true: the first is class 0, the second "
            "class 1; class_names=FILE: a file with their names, one per line, in this order"
        )
    raise VitrimError(
        f"the data has {len(names)} classes ({listed(names)}), and the model does not name its {count}: which ones "
        f"they are cannot be known. Take a model of these, or {_ways()}"
    )


def _matched(data: Sequence[Name], known: Sequence[Name], *, numbered: bool) -> list[int] | None:
    """One place in ``known`` per name of ``data``, or None as in `places_of`; `VitrimError` if a name has none."""
    found = _found(data, known, synonyms=not numbered)
    missing = [name.given for name, places in zip(data, found, strict=True) if not places]
    # Every name that was found is in its place: the rest may be spelled in another way.
    own = len(data) == len(known) and all(place in each for place, each in enumerate(found) if each)
    if own and not missing:
        return list(range(len(known)))
    if missing and len(missing) < len(data) and numbered and own:
        return None
    if len(missing) == len(data):
        raise VitrimError(
            f"the data's classes ({listed(missing)}) are none of the model's ({listed(one.given for one in known)}): "
            f"take a model of these, or {_ways()}"
        )
    if missing:
        pairs = ((one.given, known[each[0]].words) for one, each in zip(data, found, strict=True) if each)
        some = [one if one == other else f"{one} ({other})" for one, other in pairs]
        raise VitrimError(
            f"the model does not have {len(missing)} of the data's {len(data)} classes: {listed(missing)}; found among "
            f"its {len(known)}: {listed(some)}. Take a model of these, or {_ways()}"
        )
    # Case first, then what is left over: each step can only make the choice smaller.
    found = _told_apart(_by_case(found, data, known))
    several = next((place for place, each in enumerate(found) if len(each) > 1), None)
    if several is not None:
        both = ", ".join(
            f"{one.words} ({one.id})" if one.id else one.given for one in (known[k] for k in found[several])
        )
        raise VitrimError(
            f"class '{data[several].given}' of the data may be several of the model's: {both}; give its name in full, "
            "or its id, with --data-option class_names=FILE"
        )
    places = [each[0] for each in found]
    twice = next((place for place, count in Counter(places).items() if count > 1), None)
    if twice is not None:
        both = " and ".join(f"'{one.given}'" for one, place in zip(data, places, strict=True) if place == twice)
        raise VitrimError(
            f"classes {both} of the data are one of the model's, {known[twice].words}: join them, or give their names "
            "with --data-option class_names=FILE"
        )
    return places


def _found(data: Sequence[Name], known: Sequence[Name], *, synonyms: bool = True) -> list[list[int]]:
    """All places in ``known`` that fit each name of ``data`` equally well; without ``synonyms`` by whole names."""
    found: list[list[int]] = [[] for _ in data]
    for of_data, of_model in TIERS if synonyms else [(keys, keys) for keys, _ in TIERS]:
        _find(found, data, known, of_data, of_model)
    if synonyms:
        for number, name in enumerate(data):
            if not found[number]:
                found[number] = _counted(name, known)
        _find(found, data, known, *SYNONYMS)
    return found


def _find(found: list[list[int]], data: Sequence[Name], known: Sequence[Name], of_data: Keys, of_model: Keys) -> None:
    """Fill in the places of names that have none yet and share a key with a class of the model."""
    left = [number for number, places in enumerate(found) if not places]
    if not left:
        return
    # A dict as an ordered set: two synonyms may lead to one class.
    places_by: Mapping[str, dict[int, None]] = defaultdict(dict)
    for place, name in enumerate(known):
        for key in of_model(name):
            if key:
                places_by[key][place] = None
    for number in left:
        keys = [key for key in of_data(data[number]) if key in places_by]
        found[number] = sorted({place for key in keys if key for place in places_by[key]})


def _counted(name: Name, known: Sequence[Name]) -> list[int]:
    """The place of a name that says it itself, beside a name of the class there."""
    found = NUMBERED.fullmatch(name.given)
    if found is None:
        return []
    place, text = int(found[1] or found[4]), spelling(found[2] or found[3])
    return [place] if place < len(known) and text in map(spelling, known[place].parts) else []


def _by_case(found: Sequence[list[int]], data: Sequence[Name], known: Sequence[Name]) -> list[list[int]]:
    """Places of names that differ from another of the data's in case alone, which are told by it."""
    alike = set(_alike([one.given for one in data]))
    cased: list[list[int]] = [[] for _ in data]
    _find(cased, data, known, lambda name: map(written, name.whole), lambda name: map(written, name.first))
    return [own if place in alike and own else each for place, (each, own) in enumerate(zip(found, cased, strict=True))]


def _told_apart(found: Sequence[Sequence[int]]) -> list[list[int]]:
    """Places without those that a name with only one place has: two names are never one class.

    Example:
        >>> _told_apart([[134, 517], [517], [3]])
        [[134], [517], [3]]
    """
    places = [list(each) for each in found]
    # Repeat: a class that becomes certain frees others.
    while True:
        taken = {each[0] for each in places if len(each) == 1}
        fewer = [each if len(each) == 1 else [one for one in each if one not in taken] or each for each in places]
        if fewer == places:
            return places
        places = fewer


def _numbers(names: Iterable[Name]) -> bool:
    return all(name.given.strip().isdecimal() for name in names)


def _in_order(names: Sequence[str], count: int, *, alone: bool) -> bool:
    """True if the order of the names leaves no doubt about the classes that they are.

    Numbers are in order if each is its own place. Names of as many classes as the model has are taken to be in its
    order, if it is ``alone``, without names; numbers only if they count up.
    """
    if not all(name.strip().isdecimal() for name in names):
        return alone and len(names) == count
    # Classes in the order of their text, (0, 1, 10, 11, 2), would each stand at another's place.
    numbers = [int(name) for name in names]
    return numbers == list(range(len(names))) or (alone and len(names) == count and numbers == sorted(numbers))


def _numbers_in_names(names: Sequence[str], count: int | None) -> list[int]:
    wrong = next((name for name in names if not name.strip().isdecimal() or int(name) >= (count or 0)), None)
    if wrong is not None:
        raise VitrimError(
            f"class '{wrong}' of the data is no number of a class of the model, 0 to {(count or 0) - 1}, as data "
            f"option {BY_NUMBER}=names says"
        )
    places = [int(name) for name in names]
    if len(set(places)) < len(places):
        raise VitrimError(
            f"two classes of the data have the same number ({listed(names)}): data option {BY_NUMBER}=names"
        )
    return places


def _ways() -> str:
    return (
        "name them as the model does, one per line in the order of the labels, with --data-option class_names=FILE; "
        "score without them (--task embedding; `vitrim optimize`: --no-labels); or say that every label is the number "
        f"of the model's class: --data-option {BY_NUMBER}=true"
    )


# ---- sentences -------------------------------------------------------------------------------------------------------


def told_apart(names: Sequence[str]) -> list[str]:
    """Words for classes, each its own: with synonyms, or the definition of its id, where two are alike.

    A `VitrimError` if two come to the same words: only the first could ever be predicted.

    Example:
        >>> told_apart(["n02099601", "n03710637", "n03710721", "cat"])
        ['golden retriever', 'maillot', 'maillot, tank suit', 'cat']
    """
    data = [Name.of(name) for name in names]
    texts = [one.words for one in data]
    # First with all synonyms, then by definition, and only where words are still alike.
    for longer in (lambda one: one.whole[-1], _defined):
        for place in _alike(texts):
            if data[place].id is not None and data[place].whole:
                texts[place] = longer(data[place])
    alike = list(_alike(texts))
    if alike:
        one, other = (names[place] for place in alike[:2])
        raise VitrimError(
            f"classes '{one}' and '{other}' of the data come to the same words, '{texts[alike[0]].replace('_', ' ')}', "
            "so one could never be predicted: tell them apart with --data-option class_names=FILE"
        )
    return texts


def _alike(texts: Sequence[str]) -> Iterator[int]:
    """Places of texts that are spelt as another."""
    by_spelling: Mapping[str, list[int]] = defaultdict(list)
    for place, text in enumerate(texts):
        by_spelling[spelling(text)].append(place)
    return (place for places in by_spelling.values() if len(places) > 1 for place in places)


def _defined(name: Name) -> str:
    """A name with its definition in WordNet, up to the first semicolon."""
    assert name.id is not None
    return str(_description(name.id, detailed=True)).replace(": ", ", ", 1).partition(";")[0]
