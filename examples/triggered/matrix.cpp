// SPDX-License-Identifier: MIT OR Apache-2.0
// Reads graphs in the coordinate format of Matrix Market. Available C++ readers are parts of large solver libraries, so
// this example has its own small reader, which supports only what a graph needs and refuses everything else.
#include "graph.hpp"

#include <algorithm>
#include <cctype>
#include <fstream>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace {

class reader {
  public:
    explicit reader(std::string path) : path_(std::move(path)), file_(path_) {
        if (!file_) {
            throw std::invalid_argument("-matrix " + path_ + ": cannot be opened");
        }
    }

    [[nodiscard]] std::invalid_argument refusal(const std::string &why) const {
        return std::invalid_argument("-matrix " + path_ + ": line " + std::to_string(line_) + ": " + why);
    }

    /// Reads the next line that is not empty. Returns false at the end of the file.
    bool next(std::string &text) {
        while (std::getline(file_, text)) {
            ++line_;
            if (text.find_first_not_of(" \t\r") != std::string::npos) {
                return true;
            }
        }
        if (file_.bad()) {
            throw refusal("cannot be read");
        }
        return false;
    }

  private:
    std::string path_;
    std::ifstream file_;
    std::size_t line_ = 0;
};

std::string lowered(std::string text) {
    std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
    return text;
}

/// Reads a whole number from 1 to `most`. Returns false if there is none.
bool take(std::istringstream &in, std::uint64_t most, std::uint64_t &value) {
    std::string digits;
    if (!(in >> digits) || digits.size() > 18 || digits.find_first_not_of("0123456789") != std::string::npos) {
        return false;
    }
    value = std::stoull(digits);
    return value >= 1 && value <= most;
}

} // namespace

graph read_matrix(const std::string &path) {
    reader file(path);
    std::string line;
    std::array<std::string, 5> words; // the banner
    if (file.next(line)) {
        std::istringstream banner(lowered(line));
        for (std::string &each : words) {
            banner >> each;
        }
    }
    const auto is_one_of = [](const std::string &name, std::initializer_list<const char *> known) {
        return std::find(known.begin(), known.end(), name) != known.end();
    };
    if (words[0] != "%%matrixmarket" || words[1] != "matrix" || words[2] != "coordinate" ||
        !is_one_of(words[3], {"real", "integer", "pattern"}) || !is_one_of(words[4], {"general", "symmetric"})) {
        throw file.refusal("must be %%MatrixMarket matrix coordinate, real, integer or pattern, general or symmetric");
    }
    const bool is_symmetric = words[4] == "symmetric";
    const bool has_values = words[3] != "pattern";
    do {
        if (!file.next(line)) {
            throw file.refusal("the sizes are missing");
        }
    } while (line[0] == '%');
    constexpr std::uint64_t most_vertices = std::uint64_t{1} << 31;
    std::uint64_t rows = 0;
    std::uint64_t columns = 0;
    std::uint64_t entries = 0;
    std::istringstream sizes(line);
    std::string rest;
    if (!take(sizes, most_vertices, rows) || !take(sizes, most_vertices, columns) ||
        !take(sizes, std::uint64_t{1} << 40, entries) || sizes >> rest) {
        throw file.refusal("must be rows, columns and entries, 1 or more each");
    }
    std::vector<std::pair<std::uint32_t, std::uint32_t>> edges; // to and from
    for (std::uint64_t i = 0; i < entries; ++i) {
        if (!file.next(line)) {
            throw file.refusal("the file ends after " + std::to_string(i) + " of " + std::to_string(entries) +
                               " entries");
        }
        std::istringstream entry(line);
        std::uint64_t row = 0;
        std::uint64_t column = 0;
        double value = 0;
        if (!take(entry, rows, row) || !take(entry, columns, column) || (has_values && !(entry >> value)) ||
            entry >> rest) {
            throw file.refusal("must be a row, a column" + std::string(has_values ? " and a value" : "") + " within " +
                               std::to_string(rows) + " x " + std::to_string(columns));
        }
        edges.emplace_back(static_cast<std::uint32_t>(row - 1), static_cast<std::uint32_t>(column - 1));
        if (is_symmetric && row != column) {
            edges.emplace_back(static_cast<std::uint32_t>(column - 1), static_cast<std::uint32_t>(row - 1));
        }
    }
    if (file.next(line)) {
        throw file.refusal("there is more than " + std::to_string(entries) + " entries");
    }
    std::sort(edges.begin(), edges.end());
    const auto vertices = static_cast<std::size_t>(std::max(rows, columns));
    graph made;
    made.outgoing.assign(vertices, 0);
    made.offsets.assign(vertices + 1, 0);
    for (const auto &[to, from] : edges) {
        made.sources.push_back(from);
        ++made.outgoing[from];
        ++made.offsets[to + 1];
    }
    std::partial_sum(made.offsets.begin(), made.offsets.end(), made.offsets.begin());
    return made;
}
