// The parameters that a kernel receives in addition to its own: the operands of its score policy
// and of its extents.
#pragma once

namespace tilewise {

template <typename Params, typename Part, bool extended = Part::has_operands>
struct ExtendedParams {
  using Type = Params;
};
template <typename Params, typename Part>
struct ExtendedParams<Params, Part, true> {
  struct Type : Params, Part::Operands {};
};

template <typename Params, typename... Parts>
struct AllParams {
  using Type = Params;
};
template <typename Params, typename First, typename... Rest>
struct AllParams<Params, First, Rest...> {
  using Type = typename AllParams<typename ExtendedParams<Params, First>::Type, Rest...>::Type;
};

// The parameters of a kernel with these parts: its own, followed by the operands of each part.
template <typename Params, typename... Parts>
using ParamsOf = typename AllParams<Params, Parts...>::Type;

}  // namespace tilewise
