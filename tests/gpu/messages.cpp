// SPDX-License-Identifier: MIT OR Apache-2.0
// Measures latency and bandwidth of messages between two processes, from 8 B to 1 GiB, in GPU memory. Messages are sent
// by tag, or fetched by the descriptor of a buffer. Every byte is checked. Run as two processes:
// `messages RANK SOCKET [MOST_BYTES [staged]]`, each with only the GPU visible that it must use. Rank 0 prints.
//
//   latency     half of a round trip: a message of this size each way, and the host waits for each
//   in turn     the same with each receive posted after the previous send has ended, as by MPI_Send and MPI_Recv
//   bandwidth   windows of 16 messages, each answered by the receiver with an empty message
//
// A descriptor is sent as the metadata of an empty message. The time that the host needs for posting is also printed;
// it is part of the latency. With `staged` messages are also sent through pinned host memory, as in programs whose
// messages do not support GPU memory: the whole buffer is copied to the host, sent from there, and copied to the
// receiver's GPU.
#include <mpgpu/mpgpu.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr std::uint64_t window = 16;
/// Maximum total size in bytes of the buffers of a series of messages. Longer series use buffers several times.
constexpr std::uint64_t most_at_once = 2ULL << 30U;

int rank = 0;
mp_context_t context;
mp_messenger_t messenger;
mp_stream_t stream;

void ok(mp_status_t status, const char *what) {
    if (status != MP_SUCCESS) {
        std::fprintf(stderr, "rank %d: %s: %s\n", rank, what, mp_last_error());
        std::exit(1);
    }
}

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Returns the word at `index` of a message.
std::uint64_t word(std::uint64_t round, std::uint64_t index) {
    return (index + round * 0x9E3779B97F4A7C15ULL) * 0xD1B54A32D192ED03ULL;
}

/// Copies between the host and the GPU, and waits until the copy has finished.
void copy(void *to, std::int32_t to_device, const void *from, std::int32_t from_device, std::uint64_t bytes) {
    const mp_transfer_t transfer{to, to_device, from, from_device, bytes};
    mp_plan_t plan;
    ok(mp_plan(context, &transfer, 1, nullptr, &plan), "planning a copy");
    mp_request_t done;
    ok(mp_execute(plan, stream, &done), "a copy");
    ok(mp_wait(&done, nullptr), "waiting for a copy");
    ok(mp_plan_destroy(plan), "destroying a plan");
}

enum class way { tagged, descriptor, staged };
enum class use { sent, received };

struct buffers {
    std::uint64_t bytes;
    std::uint64_t count;
    std::uint64_t stride;
    char *device;
    char *staging = nullptr;       ///< pinned host memory of the same size, if messages are staged
    std::vector<mp_plan_t> copies; ///< copies between both, for each buffer
    std::vector<std::uint64_t> host;

    buffers(std::uint64_t size, way how, use what)
        : bytes(size), count(std::clamp<std::uint64_t>(most_at_once / size, 1, window)),
          stride((size + 255) / 256 * 256), device(nullptr), host((size + 7) / 8) {
        void *memory = nullptr;
        ok(mp_alloc(context, 0, count * stride, &memory), "allocating");
        device = static_cast<char *>(memory);
        if (how != way::staged) {
            return;
        }
        ok(mp_alloc_shared(context, MP_DEVICE_HOST, count * stride, &memory), "allocating host memory");
        staging = static_cast<char *>(memory);
        mp_plan_options_t one_path = MP_PLAN_OPTIONS_INIT;
        one_path.max_paths = 1;
        for (std::uint64_t index = 0; index < count; ++index) {
            char *const gpu = at(index);
            char *const cpu = at_host(index);
            const mp_transfer_t copy = what == use::sent ? mp_transfer_t{cpu, MP_DEVICE_HOST, gpu, 0, bytes}
                                                         : mp_transfer_t{gpu, 0, cpu, MP_DEVICE_HOST, bytes};
            ok(mp_plan(context, &copy, 1, &one_path, &copies.emplace_back(nullptr)), "planning a copy");
        }
    }
    ~buffers() {
        for (mp_plan_t copy : copies) {
            mp_plan_destroy(copy);
        }
        mp_free(context, staging);
        mp_free(context, device);
    }
    buffers(const buffers &) = delete;
    buffers &operator=(const buffers &) = delete;

    [[nodiscard]] char *at(std::uint64_t index) const { return device + index % count * stride; }
    [[nodiscard]] char *at_host(std::uint64_t index) const { return staging + index % count * stride; }
    /// Starts the copy of a buffer to or from the host.
    [[nodiscard]] mp_request_t stage(std::uint64_t index) const {
        mp_request_t done;
        ok(mp_execute(copies[index % count], stream, &done), "a copy");
        return done;
    }

    /// Fills all buffers with the words of round `round`.
    void fill(std::uint64_t round) {
        for (std::uint64_t index = 0; index < count; ++index) {
            for (std::uint64_t i = 0; i < host.size(); ++i) {
                host[i] = word(round + index, i);
            }
            copy(at(index), 0, host.data(), MP_DEVICE_HOST, bytes);
        }
    }

    /// Checks that all buffers contain the words of round `round`.
    void check(std::uint64_t round, const char *what) {
        for (std::uint64_t index = 0; index < count; ++index) {
            std::fill(host.begin(), host.end(), 0);
            copy(host.data(), MP_DEVICE_HOST, at(index), 0, bytes);
            std::uint64_t expected = 0;
            for (std::uint64_t i = 0; i < host.size(); ++i) {
                expected = word(round + index, i);
                const std::uint64_t left = std::min<std::uint64_t>(8, bytes - 8 * i);
                if (std::memcmp(&host[i], &expected, left) != 0) {
                    std::fprintf(stderr, "rank %d: %s of %llu bytes: buffer %llu is wrong from byte %llu on\n", rank,
                                 what, static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(index),
                                 static_cast<unsigned long long>(8 * i));
                    std::exit(1);
                }
            }
        }
    }
};

constexpr std::uint64_t exactly = ~0ULL;
std::uint32_t other_rank() {
    return static_cast<std::uint32_t>(1 - rank);
}

mp_request_t send(const void *data, std::uint64_t bytes, std::uint64_t tag, const void *metadata = nullptr,
                  std::size_t metadata_bytes = 0) {
    mp_request_t request;
    ok(mp_send(messenger, data, bytes, other_rank(), tag, metadata, metadata_bytes, stream, &request), "mp_send");
    return request;
}

mp_request_t receive(void *data, std::uint64_t bytes, std::uint64_t tag) {
    mp_request_t request;
    ok(mp_receive(messenger, data, bytes, static_cast<std::int32_t>(other_rank()), tag, exactly, stream, &request),
       "mp_receive");
    return request;
}

void wait(mp_request_t request) {
    ok(mp_wait(&request, nullptr), "mp_wait");
}

/// Synchronises the ranks by an empty message in each direction.
void meet() {
    mp_request_t sent = send(nullptr, 0, 1000);
    wait(receive(nullptr, 0, 1000));
    wait(sent);
}

/// Starts the send of buffer `index` by method `how`, and returns the request.
mp_request_t give(way how, const buffers &out, std::uint64_t index, std::uint64_t tag) {
    if (how == way::tagged) {
        return send(out.at(index), out.bytes, tag);
    }
    if (how == way::staged) {
        wait(out.stage(index));
        return send(out.at_host(index), out.bytes, tag);
    }
    mp_message_descriptor_t descriptor;
    mp_request_t released;
    ok(mp_message_describe(messenger, out.at(index), out.bytes, stream, &descriptor, &released), "mp_message_describe");
    mp_request_t sent = send(nullptr, 0, tag, &descriptor, sizeof descriptor);
    ok(mp_request_destroy(&sent), "mp_request_destroy");
    return released;
}

/// Starts the receive of a buffer that the other rank sends by `give`, and returns the request. `taken` completes the
/// receive.
mp_request_t take(way how, const buffers &in, std::uint64_t index, std::uint64_t tag) {
    switch (how) {
    case way::tagged:
        return receive(in.at(index), in.bytes, tag);
    case way::staged:
        return receive(in.at_host(index), in.bytes, tag);
    default:
        return receive(nullptr, 0, tag);
    }
}

mp_request_t taken(way how, mp_request_t request, const buffers &in, std::uint64_t index) {
    if (how == way::tagged) {
        return request;
    }
    if (how == way::staged) {
        wait(request);
        return in.stage(index);
    }
    mp_message_descriptor_t descriptor;
    mp_message_info_t info = MP_MESSAGE_INFO_INIT;
    info.metadata = &descriptor;
    info.metadata_capacity = sizeof descriptor;
    ok(mp_wait(&request, &info), "mp_wait");
    mp_request_t fetched;
    ok(mp_message_fetch(messenger, &descriptor, in.at(index), in.bytes, stream, &fetched), "mp_message_fetch");
    return fetched;
}

struct figures {
    double latency = 0;   ///< microseconds, median
    double in_turn = 0;   ///< microseconds, median
    double posting = 0;   ///< microseconds of the latency that the host needs to send
    double bandwidth = 0; ///< 1e9 bytes per second, median
};

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

figures measure(way how, std::uint64_t bytes) {
    buffers out(bytes, how, use::sent);
    buffers in(bytes, how, use::received);
    const char *what = how == way::tagged ? "a tagged message" : how == way::staged ? "a staged one" : "a descriptor";
    std::vector<double> latencies;
    std::vector<double> postings;
    const int rounds = bytes <= (1U << 20U) ? 500 : bytes <= (64U << 20U) ? 60 : 12;
    out.fill(1);
    meet();
    for (int round = 0; round < rounds + 10; ++round) {
        mp_request_t incoming = take(how, in, 0, 1);
        const double begun = now();
        double posted = begun;
        if (rank == 0) {
            const mp_request_t sent = give(how, out, 0, 1);
            posted = now();
            wait(taken(how, incoming, in, 0));
            wait(sent);
        } else {
            wait(taken(how, incoming, in, 0));
            wait(give(how, out, 0, 1));
        }
        if (round >= 10) {
            latencies.push_back((now() - begun) / 2 * 1e6);
            postings.push_back((posted - begun) * 1e6);
        }
    }
    std::vector<double> turns;
    for (int round = 0; how == way::tagged && round < rounds + 10; ++round) {
        const double begun = now();
        for (const int sender : {0, 1}) {
            wait(sender == rank ? give(how, out, 0, 1) : take(how, in, 0, 1));
        }
        if (round >= 10) {
            turns.push_back((now() - begun) / 2 * 1e6);
        }
    }
    std::vector<double> rates;
    const int windows = bytes <= (1U << 20U) ? 60 : bytes <= (64U << 20U) ? 12 : 4;
    for (int round = 0; round < windows + 2; ++round) {
        const std::uint64_t number = 100 + static_cast<std::uint64_t>(round);
        // The check of the last round covers the words that were written last.
        if (rank == 0 && (round == 0 || round == windows + 1)) {
            out.fill(number);
        }
        meet();
        const double begun = now();
        std::vector<mp_request_t> requests;
        if (rank == 0) {
            for (std::uint64_t index = 0; index < window; ++index) {
                requests.push_back(give(how, out, index, 2 + index));
            }
            std::for_each(requests.begin(), requests.end(), wait);
            wait(receive(nullptr, 0, 500));
        } else {
            for (std::uint64_t index = 0; index < window; ++index) {
                requests.push_back(take(how, in, index, 2 + index));
            }
            for (std::uint64_t index = 0; index < window; ++index) {
                requests[index] = taken(how, requests[index], in, index);
            }
            std::for_each(requests.begin(), requests.end(), wait);
            wait(send(nullptr, 0, 500));
        }
        if (round >= 2) {
            rates.push_back(static_cast<double>(bytes * window) / (now() - begun) / 1e9);
        }
        if (rank == 1 && round == windows + 1) {
            in.check(number, what);
        }
    }
    meet();
    return {median(latencies), turns.empty() ? 0 : median(turns), median(postings), median(rates)};
}

} // namespace

int main(int argc, char **argv) {
    if (argc < 3) {
        std::fprintf(stderr, "usage: messages RANK SOCKET [MOST_BYTES [staged]]\n");
        return 2;
    }
    rank = std::atoi(argv[1]);
    const std::uint64_t most = argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1ULL << 30U;
    const bool staged = argc > 4 && std::strcmp(argv[4], "staged") == 0;
    ok(mp_context_create(nullptr, &context), "mp_context_create");
    ok(mp_stream_create(context, 0, &stream), "mp_stream_create");
    mp_node_options_t options = MP_NODE_OPTIONS_INIT;
    options.socket = argv[2];
    mp_node_t node;
    ok(mp_node_create(context, static_cast<std::uint32_t>(rank), 2, nullptr, nullptr, &options, &node),
       "mp_node_create");
    ok(mp_messenger_create(node, nullptr, &messenger), "mp_messenger_create");
    if (rank == 0) {
        std::printf("%12s  %38s  %28s%s\n%12s  %9s %9s %9s %8s  %9s %9s %8s%s\n", "", "tagged", "by descriptor",
                    staged ? "               staged  tagged: times as fast" : "", "bytes", "us", "in turn", "posting",
                    "GB/s", "us", "posting", "GB/s", staged ? "         us     GB/s     latency  bandwidth" : "");
    }
    std::vector<double> sooner;
    std::vector<double> faster;
    for (std::uint64_t bytes = 8; bytes <= most; bytes *= bytes < (1U << 16U) ? 8 : 4) {
        const figures tagged = measure(way::tagged, bytes);
        const figures described = measure(way::descriptor, bytes);
        const figures through_host = staged ? measure(way::staged, bytes) : figures{};
        if (rank == 0) {
            std::printf("%12llu  %9.2f %9.2f %9.2f %8.2f  %9.2f %9.2f %8.2f", static_cast<unsigned long long>(bytes),
                        tagged.latency, tagged.in_turn, tagged.posting, tagged.bandwidth, described.latency,
                        described.posting, described.bandwidth);
            if (staged) {
                sooner.push_back(through_host.latency / tagged.latency);
                faster.push_back(tagged.bandwidth / through_host.bandwidth);
                std::printf("  %9.2f %8.2f  %10.1f %10.1f", through_host.latency, through_host.bandwidth, sooner.back(),
                            faster.back());
            }
            std::printf("\n");
            std::fflush(stdout);
        }
    }
    ok(mp_messenger_destroy(messenger), "mp_messenger_destroy");
    ok(mp_node_destroy(node), "mp_node_destroy");
    ok(mp_stream_destroy(context, stream), "mp_stream_destroy");
    ok(mp_context_destroy(context), "mp_context_destroy");
    if (rank == 0) {
        for (const auto &[what, times] : {std::pair{"latency", &sooner}, std::pair{"bandwidth", &faster}}) {
            if (!times->empty()) {
                const auto [least, most_of_all] = std::minmax_element(times->begin(), times->end());
                std::printf("tagged beside staged, %s: %.1fx to %.1fx\n", what, *least, *most_of_all);
            }
        }
        std::printf("every byte right\n");
    }
    return 0;
}
