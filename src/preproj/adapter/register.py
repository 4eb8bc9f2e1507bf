"""Make PEFT know this method.

PEFT's ``register_peft_method`` takes methods from outside, but only under a name that is already a member of the
closed enum ``PeftType``. So one member is added here, the only place that reaches into PEFT's internals. An enum
member made this way pickles, copies and serialises to JSON like the others once preproj is imported.
"""

from peft.utils.peft_types import PeftType, register_peft_method

NAME = "PREPROJ"


def peft_type() -> PeftType:
    """Return the enum member of this method, adding it on the first call.

    Raises:
        ImportError: if the installed PEFT keeps its method names in another way.
    """
    if NAME not in PeftType.__members__:
        _add_member()
    return PeftType(NAME)


def _add_member() -> None:
    try:
        member = str.__new__(PeftType, NAME)
        member._name_ = NAME
        member._value_ = NAME
        member._sort_order_ = len(PeftType)
        type.__setattr__(PeftType, NAME, member)  # EnumMeta.__setattr__ guards existing members only
        PeftType._member_map_[NAME] = member
        PeftType._member_names_.append(NAME)
        PeftType._value2member_map_[NAME] = member
        known = PeftType(NAME) is member and PeftType[NAME] is member and NAME in list(PeftType)
    except (AttributeError, TypeError, ValueError) as error:
        raise ImportError(_BROKEN) from error
    if not known:
        raise ImportError(_BROKEN)


_BROKEN = (
    "preproj cannot register its method: the installed peft keeps PeftType in a form this version of preproj does "
    "not know. Please install a peft version named in preproj's requirements and report this."
)


def register(config_cls: type, model_cls: type) -> None:
    """Register the method with PEFT; harmless when called again.

    Args:
        config_cls: the configuration class.
        model_cls: the tuner class.
    """
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    if peft_type() not in PEFT_TYPE_TO_CONFIG_MAPPING:
        register_peft_method(
            name=NAME.lower(),
            config_cls=config_cls,
            model_cls=model_cls,
            prefix=model_cls.prefix,  # type: ignore[attr-defined]
        )
