// Writes config.cuh of each variant, and its threads, below a folder: `write_config FOLDER`. Runs when the tests are built.
#include <fstream>
#include <iostream>

#include "cuda/attention/write_kv.h"
#include "cuda/lanes/mla_variants.h"
#include "cuda/lanes/recurrent_variants.h"
#include "cuda/lanes/short_conv_variants.h"
#include "cuda/lanes/variants.h"

int main(int argc, char** argv) {
  if (argc != 2) return std::cerr << "expected one folder, got " << argc - 1 << " arguments\n", 2;
  int result = 0;
  const auto write = [&](const std::string& name, const imbrex::cuda::KernelKey& key) {
    std::ofstream file(std::string(argv[1]) + "/" + name + "/config.cuh");
    file << imbrex::cuda::config_text(key);
    if (!file.flush()) std::cerr << "cannot write the constants of " << name << "\n", result = 1;
  };
  for (const imbrex::test::Variant& v : imbrex::test::variants()) {
    write(v.name, v.key());
    if (v.packs_mask()) write(std::string("mask_") + v.name, imbrex::cuda::pack_mask_key(v.arch, v.c.spec));
  }
  for (const imbrex::test::ShortConvVariant& v : imbrex::test::short_conv_variants()) write(v.name, v.key());
  for (const imbrex::test::RecurrentVariant& v : imbrex::test::recurrent_variants()) {
    write(v.tokens(), v.key());
    if (const auto prompts = v.prompt_kernel()) write(std::string("prompts_") + v.name, prompts->key);
    if (const auto outputs = v.output_kernel()) write(v.outputs, outputs->key);
    if (const auto chunks = v.chunks()) {
      write(std::string("weights_") + v.name, chunks->weights), write(std::string("chunks_") + v.name, chunks->chunks);
      if (chunks->most_segments > 1)
        write(std::string("ends_") + v.name, chunks->ends), write(std::string("segments_") + v.name, chunks->segments);
    }
  }
  const imbrex::test::RecurrentVariant wide = imbrex::test::wide_outputs_variant();
  write(wide.outputs, wide.output_kernel()->key);
  for (const imbrex::test::MlaVariant& v : imbrex::test::mla_variants()) write(v.name, v.key());
  imbrex::AttentionSpec records;
  records.q_dtype = imbrex::DType::f32, records.kv_format = imbrex::KvFormat::fp8_ds_mla;
  write("write_records", imbrex::cuda::write_kv_key("sm_90a", records, imbrex::DType::f32));
  return result;
}
