// Prints CuTe's layouts of the same instructions: for every lane and value its place in the matrix, or its bit in the
// source. For g++, with the headers of CUTLASS and of CUDA.
#include <cstdio>

#include <cute/tensor.hpp>
#include <cute/atom/copy_traits_sm75.hpp>
#include <cute/atom/mma_traits_sm80.hpp>

using namespace cute;

template <class Layout>
void print_map(const char* name, Layout layout) {
  printf("%s", name);
  for (int lane = 0; lane < size<0>(layout); lane++) {
    for (int value = 0; value < size<1>(layout); value++) printf(" %d", int(layout(lane, value)));
  }
  printf("\n");
}

int main() {
  using Product = MMA_Traits<SM80_16x8x16_F32BF16BF16F32_TN>;
  print_map("a", Product::ALayout{});
  print_map("b", Product::BLayout{});
  print_map("c", Product::CLayout{});
  using Load = Copy_Traits<SM75_U32x4_LDSM_N>;
  print_map("load_source", Load::SrcLayout{});
  print_map("load_target", Load::DstLayout{});
  using Transposed = Copy_Traits<SM75_U16x8_LDSM_T>;
  print_map("transposed_source", Transposed::SrcLayout{});
  print_map("transposed_target", Transposed::DstLayout{});
}
