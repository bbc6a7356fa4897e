"""LLVM IR of a copy that computes xxh3_64 on the way.

The hash is XXH3 for long inputs, with seed 0 and the default secret, as the xxHash specification describes it: eight
64-bit accumulators take in lines of 64 bytes, each with another part of the secret, and are scrambled after 16 lines;
the last line has a part of its own. Sizes are multiples of a line here, which leaves no overlapping last line.
"""

from __future__ import annotations

from collections.abc import Sequence

SYMBOL = "twinstage_copy_with_checksum"
LINE_BYTES = 64  # what a store writes, and its alignment: less would make it an ordinary one
MIN_BYTES = 256  # of a long input, from 241 on

_GROUP_LINES = 16
_GROUP_BYTES = _GROUP_LINES * LINE_BYTES
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_LAST_AT, _SCRAMBLE_AT, _MERGE_AT = 121, 128, 11  # parts of the secret
_PRIME32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIME64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
_AVALANCHE = 0x165667919E3779F9
_START = (_PRIME32[2], *_PRIME64[:4], _PRIME32[1], _PRIME64[4], _PRIME32[0])


def copy_code() -> str:
    """(target, source, size) -> xxh3_64 of the source.

    `size` is a multiple of a line and at least MIN_BYTES, `target` is aligned to a line. Stores past the caches may
    become visible late and in any order; the fence orders them before all that follows.
    """
    secret = ", ".join(f"i8 {byte}" for byte in _SECRET)
    return f"""
@secret = private constant [{len(_SECRET)} x i8] [{secret}], align {LINE_BYTES}

define i64 @{SYMBOL}(ptr noalias %target, ptr noalias %source, i64 %size) {{
entry:
  %last = sub i64 %size, {LINE_BYTES}
  %grouped = and i64 %last, {-_GROUP_BYTES}
  %has_group = icmp ne i64 %grouped, 0
  br i1 %has_group, label %group, label %rest
{_group()}
rest:
  %rest_at = phi i64 [0, %entry], [%group_next, %group]
  %rest_sum = phi <8 x i64> [{_vector(_START)}, %entry], [%group_sum, %group]
  br label %check
check:
  %at = phi i64 [%rest_at, %rest], [%next, %single]
  %sum = phi <8 x i64> [%rest_sum, %rest], [%single_sum, %single]
  %is_single = icmp ult i64 %at, %last
  br i1 %is_single, label %single, label %final
single:
  %done = sub i64 %at, %rest_at
  %part_at = lshr i64 %done, 3
  %part = getelementptr i8, ptr @secret, i64 %part_at
  %secret_part = load <8 x i64>, ptr %part, align 8
{_line("single", total="%sum", at="%at", secret="%secret_part")}
  %next = add i64 %at, {LINE_BYTES}
  br label %check
final:
{_line("final", total="%sum", at="%last", secret=_secret_vector(_LAST_AT))}
  fence seq_cst
{_merge("%final_sum")}
}}
!0 = !{{i32 1}}
"""


def _group() -> str:
    """A block of 16 lines, and the scrambling after it."""
    lines, total = [], "%group_start"
    for index in range(_GROUP_LINES):
        lines.append(f"  %g{index}_at = add i64 %group_at, {index * LINE_BYTES}")
        lines.append(_line(f"g{index}", total=total, at=f"%g{index}_at", secret=_secret_vector(8 * index)))
        total = f"%g{index}_sum"
    body = "\n".join(lines)
    return f"""
group:
  %group_at = phi i64 [0, %entry], [%group_next, %group]
  %group_start = phi <8 x i64> [{_vector(_START)}, %entry], [%group_sum, %group]
{body}
  %shifted = lshr <8 x i64> {total}, {_vector([47] * 8)}
  %folded = xor <8 x i64> {total}, %shifted
  %keyed = xor <8 x i64> %folded, {_secret_vector(_SCRAMBLE_AT)}
  %group_sum = mul <8 x i64> %keyed, {_vector([_PRIME32[0]] * 8)}
  %group_next = add i64 %group_at, {_GROUP_BYTES}
  %has_more = icmp ult i64 %group_next, %grouped
  br i1 %has_more, label %group, label %rest
"""


def _line(name: str, *, total: str, at: str, secret: str) -> str:
    """Copy the line at `at` and take it into the accumulators `total`; the new ones are `%name_sum`."""
    return f"""
  %{name}_from = getelementptr i8, ptr %source, i64 {at}
  %{name}_to = getelementptr i8, ptr %target, i64 {at}
  %{name}_line = load <8 x i64>, ptr %{name}_from, align 1
  store <8 x i64> %{name}_line, ptr %{name}_to, align {LINE_BYTES}, !nontemporal !0
  %{name}_key = xor <8 x i64> %{name}_line, {secret}
  %{name}_low = and <8 x i64> %{name}_key, {_vector([0xFFFFFFFF] * 8)}
  %{name}_high = lshr <8 x i64> %{name}_key, {_vector([32] * 8)}
  %{name}_product = mul <8 x i64> %{name}_low, %{name}_high
  %{name}_swapped = shufflevector <8 x i64> %{name}_line, <8 x i64> poison, <8 x i32> {_SWAP}
  %{name}_added = add <8 x i64> {total}, %{name}_swapped
  %{name}_sum = add <8 x i64> %{name}_added, %{name}_product"""


_SWAP = "<i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>"  # neighbours


def _merge(total: str) -> str:
    """Fold the accumulators and the size into 64 bits, and return them."""
    parts, result = [f"  %merged = mul i64 %size, {_signed(_PRIME64[0])}"], "%merged"
    for index in range(4):
        for half in range(2):
            name, lane = f"m{index}{half}", 2 * index + half
            parts.append(f"""
  %{name}_lane = extractelement <8 x i64> {total}, i32 {lane}
  %{name}_key = xor i64 %{name}_lane, {_signed(_secret_word(_MERGE_AT + 8 * lane))}
  %{name} = zext i64 %{name}_key to i128""")
        parts.append(f"""
  %m{index} = mul i128 %m{index}0, %m{index}1
  %m{index}_low = trunc i128 %m{index} to i64
  %m{index}_shifted = lshr i128 %m{index}, 64
  %m{index}_high = trunc i128 %m{index}_shifted to i64
  %m{index}_folded = xor i64 %m{index}_low, %m{index}_high
  %m{index}_sum = add i64 {result}, %m{index}_folded""")
        result = f"%m{index}_sum"
    parts.append(f"""
  %end_shifted = lshr i64 {result}, 37
  %end_folded = xor i64 {result}, %end_shifted
  %end_product = mul i64 %end_folded, {_signed(_AVALANCHE)}
  %end_high = lshr i64 %end_product, 32
  %checksum = xor i64 %end_product, %end_high
  ret i64 %checksum""")
    return "\n".join(parts)


def _secret_vector(start: int) -> str:
    return _vector([_secret_word(start + 8 * lane) for lane in range(8)])


def _secret_word(start: int) -> int:
    return int.from_bytes(_SECRET[start : start + 8], "little")


def _vector(values: Sequence[int]) -> str:
    return "<" + ", ".join(f"i64 {_signed(value)}" for value in values) + ">"


def _signed(value: int) -> int:
    """The 64 bits of `value` as LLVM IR writes them."""
    return value - (1 << 64) if value >> 63 else value
