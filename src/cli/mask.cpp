// `imbrex mask EXPRESSION`: the picture of a mask, and which tiles of it are empty, full or seen in part.
#include <fmt/format.h>

#include <charconv>
#include <nlohmann/json.hpp>

#include "cli/cli.h"
#include "core/check.h"
#include "core/text.h"
#include "imbrex/bound_expression.h"

namespace imbrex::cli {
namespace {

struct MaskOptions {
  std::string text;
  std::vector<std::string> tensors;
  BlockMaskShape shape{.q_len = 16, .kv_len = 0, .tile_q = 4, .tile_kv = 4};
  bool json = false;
};

// A tensor of the command line and its memory.
struct GivenTensor {
  ExpressionTensor declared;
  std::vector<int64_t> sizes;
  std::vector<int32_t> words;  // of ints and floats
  std::vector<uint8_t> bytes;  // of bools
};

constexpr int64_t kMostElements = int64_t(1) << 24;

template <class T>
bool read_number(std::string_view text, T& value) {
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && rest == text.data() + text.size();
}

// "doc=0*5,1*11" or "bias=2x3:0.5,1,2,0,0,1": values, each with a number of repetitions, and sizes where there are several.
GivenTensor parse_tensor(const std::string& text) {
  const auto wrong = [&](std::string_view part) {
    fail("cli.tensor", "a tensor such as doc=0*5,1*11 or bias=2x3:0.5,1,2,0,0,1 or seen=true,false is expected, got \"{}\" in \"{}\"", part,
         text);
  };
  const size_t equals = text.find('=');
  if (equals == std::string::npos) wrong(text);
  GivenTensor tensor{.declared = {text.substr(0, equals), ExpressionType::integer, 1}};
  std::string_view rest = std::string_view(text).substr(equals + 1);
  if (const size_t colon = rest.find(':'); colon != std::string_view::npos) {
    for (const std::string& part : split(rest.substr(0, colon), "x")) {
      int64_t size = 0;
      if (!read_number(part, size) || size < 0 || size > kMostElements) wrong(part);
      tensor.sizes.push_back(size);
    }
    rest.remove_prefix(colon + 1);
  }
  const bool real = rest.find_first_of(".e") != std::string_view::npos && rest.find("true") == std::string_view::npos &&
                    rest.find("false") == std::string_view::npos;
  const bool boolean = !real && (rest.starts_with("true") || rest.starts_with("false"));
  tensor.declared.type = boolean ? ExpressionType::boolean : real ? ExpressionType::real : ExpressionType::integer;
  for (const std::string& part : split(rest, ",")) {
    const size_t star = part.find('*');
    const std::string_view value = trim(std::string_view(part).substr(0, star));
    int64_t times = 1;
    if (star != std::string::npos &&
        (!read_number(trim(std::string_view(part).substr(star + 1)), times) || times < 0 || times > kMostElements))
      wrong(part);
    int integer = 0;
    float number = 0;
    if (boolean ? value != "true" && value != "false" : real ? !read_number(value, number) : !read_number(value, integer)) wrong(part);
    if (int64_t(tensor.words.size() + tensor.bytes.size()) + times > kMostElements) wrong("more than 2^24 elements");
    if (boolean) tensor.bytes.insert(tensor.bytes.end(), size_t(times), value == "true" ? 1 : 0);
    if (!boolean) tensor.words.insert(tensor.words.end(), size_t(times), real ? std::bit_cast<int32_t>(number) : integer);
  }
  const int64_t count = int64_t(tensor.words.size() + tensor.bytes.size());
  if (tensor.sizes.empty()) tensor.sizes = {count};
  int64_t product = 1;
  for (const int64_t size : tensor.sizes) product = std::min(product * size, kMostElements + 1);
  if (product != count || tensor.sizes.size() > 3) wrong(fmt::format("{} values", count));
  tensor.declared.rank = int(tensor.sizes.size());
  return tensor;
}

NamedTensor view_of(GivenTensor& tensor) {
  TensorView view;
  view.data = tensor.declared.type == ExpressionType::boolean ? static_cast<void*>(tensor.bytes.data()) : tensor.words.data();
  view.dtype = tensor.declared.type == ExpressionType::boolean ? DType::u8
               : tensor.declared.type == ExpressionType::real  ? DType::f32
                                                               : DType::i32;
  view.rank = tensor.declared.rank;
  int64_t stride = 1;
  for (int d = view.rank; d-- > 0; stride *= tensor.sizes[size_t(d)])
    view.sizes[size_t(d)] = tensor.sizes[size_t(d)], view.strides[size_t(d)] = stride;
  return {tensor.declared.name, view};
}

// Of every tile of keys, for one tile of queries: ' ' empty, '#' full, 'o' seen in part.
std::string tiles_of(const BlockMask& blocks, const BlockMaskShape& shape, int tile) {
  std::string tiles(size_t((shape.kv_len + shape.tile_kv - 1) / shape.tile_kv), ' ');
  for (int s = blocks.first_stretch[size_t(tile)]; s < blocks.first_stretch[size_t(tile) + 1]; ++s) {
    const KeyStretch& stretch = blocks.stretches[size_t(s)];
    for (int kv = stretch.begin; kv < stretch.end; kv += shape.tile_kv) tiles[size_t(kv / shape.tile_kv)] = stretch.shown ? '#' : 'o';
  }
  return tiles;
}

constexpr int kMostColumns = 160, kMostRows = 200;
constexpr int kLabel = 8;  // characters before a row

// A character for each element, with lines between tiles.
std::string picture_of_elements(const BoundExpression& mask, const BlockMaskShape& shape, const BlockMask& blocks) {
  std::string line(kLabel, ' '), numbers = fmt::format("{:>{}}", "q   kv  ", kLabel);
  for (int kv = 0; kv < shape.kv_len; kv += shape.tile_kv) {
    const int width = std::min(shape.tile_kv, shape.kv_len - kv);
    line += "+" + std::string(size_t(width), '-');
    const std::string number = std::to_string(kv);
    numbers += fmt::format("{:<{}}", int(number.size()) <= width ? " " + number : "", width + 1);
  }
  line += "+\n";
  std::string text = std::string(trim(numbers).empty() ? "" : numbers.substr(0, numbers.find_last_not_of(' ') + 1)) + "\n";
  std::vector<uint8_t> shown(size_t(shape.kv_len));
  for (int i = 0; i < shape.q_len; ++i) {
    const int q = shape.kv_len - shape.q_len + i;
    if (i % shape.tile_q == 0) text += line;
    const std::string tiles = tiles_of(blocks, shape, i / shape.tile_q);
    mask.mask_row({.batch = shape.batch, .head = shape.head, .q = q, .q_len = shape.q_len, .kv_len = shape.kv_len}, 0, shape.kv_len,
                  shown.data());
    text += fmt::format("{:>{}}", q, kLabel - 1) + " ";
    for (int kv = 0; kv < shape.kv_len; ++kv) {
      if (kv % shape.tile_kv == 0) text += '|';
      const char tile = tiles[size_t(kv / shape.tile_kv)];
      text += tile == 'o' && !shown[size_t(kv)] ? '.' : tile;
    }
    text += "|\n";
  }
  return text + line + "# shown, in a full tile    o shown, . hidden, in a partial tile    blank: hidden, in an empty tile\n";
}

// A character for each tile.
std::string picture_of_tiles(const BlockMaskShape& shape, const BlockMask& blocks) {
  std::string text;
  const size_t columns = size_t((shape.kv_len + shape.tile_kv - 1) / shape.tile_kv);
  const std::string line = std::string(kLabel, ' ') + "+" + std::string(columns, '-') + "+\n";
  for (int tile = 0; tile + 1 < int(blocks.first_stretch.size()); ++tile)
    text += fmt::format("{:>{}} |{}|\n", shape.kv_len - shape.q_len + tile * shape.tile_q, kLabel - 1, tiles_of(blocks, shape, tile));
  return line + text + line + "a character for each tile: # full    o partial    blank: empty\n";
}

int run_mask(MaskOptions options) {
  BlockMaskShape& shape = options.shape;
  if (shape.kv_len == 0) shape.kv_len = shape.q_len;
  std::vector<GivenTensor> tensors;
  for (const std::string& text : options.tensors) tensors.push_back(parse_tensor(text));
  std::vector<ExpressionTensor> declared;
  std::vector<NamedTensor> named;
  for (GivenTensor& tensor : tensors) declared.push_back(tensor.declared), named.push_back(view_of(tensor));
  const BoundExpression mask(parse_expression(options.text, declared), named);
  const BlockMask blocks = block_mask(mask, shape);
  const int64_t tiles = blocks.empty_tiles + blocks.full_tiles + blocks.partial_tiles;
  if (options.json) {
    nlohmann::ordered_json rows = nlohmann::ordered_json::array();
    for (size_t tile = 0; tile + 1 < blocks.first_stretch.size(); ++tile) {
      nlohmann::ordered_json row = nlohmann::ordered_json::array();
      for (int s = blocks.first_stretch[tile]; s < blocks.first_stretch[tile + 1]; ++s)
        row.push_back({{"begin", blocks.stretches[size_t(s)].begin},
                       {"end", blocks.stretches[size_t(s)].end},
                       {"full", blocks.stretches[size_t(s)].shown == 1}});
      rows.push_back(row);
    }
    const nlohmann::ordered_json out = {{"expression", mask.expression().str()},
                                        {"empty_tiles", blocks.empty_tiles},
                                        {"full_tiles", blocks.full_tiles},
                                        {"partial_tiles", blocks.partial_tiles},
                                        {"stretches", rows}};
    fmt::print("{}\n", out.dump(2));
    return kOk;
  }
  std::string text = fmt::format("{}\n{} queries, {} keys, tiles of {} x {}\n\n", mask.expression().str(), shape.q_len, shape.kv_len,
                                 shape.tile_q, shape.tile_kv);
  const int columns = shape.kv_len + (shape.kv_len + shape.tile_kv - 1) / shape.tile_kv;
  if (columns <= kMostColumns && shape.q_len <= kMostRows) {
    text += picture_of_elements(mask, shape, blocks);
  } else if (shape.kv_len / shape.tile_kv <= kMostColumns && shape.q_len / shape.tile_q <= kMostRows) {
    text += picture_of_tiles(shape, blocks);
  } else {
    text += "too many tiles for a picture\n";
  }
  const auto share = [&](int64_t count) {
    return fmt::format("{} ({:.1f} %)", count, tiles == 0 ? 0.0 : 100.0 * double(count) / double(tiles));
  };
  text += fmt::format("{} tiles: {} empty, {} full, {} partial\n", tiles, share(blocks.empty_tiles), share(blocks.full_tiles),
                      share(blocks.partial_tiles));
  fmt::print("{}", text);
  return kOk;
}

}  // namespace

void add_mask(CLI::App& app, Action& action) {
  auto options = std::make_shared<MaskOptions>();
  CLI::App* sub = app.add_subcommand("mask", "Draw the mask that an expression is, and count its empty, full and partial tiles");
  sub->add_option("EXPRESSION", options->text, "Of batch, head, q, kv, q_len, kv_len and tensors; true where the query sees the key")
      ->required();
  sub->add_option("-q,--queries", options->shape.q_len, "Query tokens; they are the last of the keys")
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  sub->add_option("-k,--keys", options->shape.kv_len, "Keys; default: as many as queries")->check(CLI::Range(1, 1 << 24));
  sub->add_option("--tile-queries", options->shape.tile_q, "Queries of a tile")->check(CLI::Range(1, 1 << 20))->capture_default_str();
  sub->add_option("--tile-keys", options->shape.tile_kv, "Keys of a tile")->check(CLI::Range(1, 1 << 20))->capture_default_str();
  sub->add_option("--batch", options->shape.batch, "The variable `batch`")->capture_default_str();
  sub->add_option("--head", options->shape.head, "The variable `head`")->capture_default_str();
  sub->add_option("-t,--tensor", options->tensors, "NAME=VALUES or NAME=2x3:VALUES; 0*5,1*3 is five zeros and three ones")->take_all();
  sub->add_flag("--json", options->json, "Print the stretches of keys that each tile of queries reads, as JSON");
  sub->footer(
      "Examples:\n"
      "  imbrex mask 'kv <= q & q - kv < 4' --queries 12 --keys 16\n"
      "  imbrex mask 'doc[q] == doc[kv] & kv <= q' --tensor 'doc=0*5,1*7,2*4'\n"
      "  imbrex mask 'q // 8192 == kv // 8192 & kv <= q' -q 65536 --tile-queries 1024 --tile-keys 1024");
  sub->callback([options, &action] { action = [options] { return run_mask(*options); }; });
}

}  // namespace imbrex::cli
