! SPDX-License-Identifier: MIT OR Apache-2.0
!
! Fortran interface to mpgpu/mpgpu.h: every constant, struct and function of the C ABI, under the same names. The header
! documents them. Most programs need only module mpgpu, whose procedures report errors in the way of Fortran.
!
! Handles and untyped pointers have the type c_ptr. Any other pointer is an argument by reference; if it is omitted,
! NULL is passed. Enumerations have the type integer(c_int). Unsigned numbers become signed numbers with the same bits.
! Variables of structure types initially have the values of the _INIT macros.
!
! Generated from mpgpu.h: UPDATE_HEADER=1 cargo test --test library fortran. Change that, not this file.
module mpgpu_c
    use, intrinsic :: iso_c_binding
    implicit none
    public

    integer(c_int32_t), parameter :: MP_DEVICE_HOST = -1
    integer(c_int32_t), parameter :: MP_DEVICE_AUTO = 2147483646
    integer(c_int32_t), parameter :: MP_ANY_RANK = -2147483647
    integer(c_int32_t), parameter :: MP_FIRST_ELSEWHERE = -1073741824
    integer(c_int32_t), parameter :: MP_BY_TAG = -1
    integer(c_int32_t), parameter :: MP_VERSION_MAJOR = 0
    integer(c_int32_t), parameter :: MP_VERSION_MINOR = 1
    integer(c_int32_t), parameter :: MP_VERSION_PATCH = 0
    integer(c_int32_t), parameter :: MP_HEADER_VERSION = 100
    integer(c_int64_t), parameter :: MP_RELAY_NONE = -huge(0_c_int64_t) - 1_c_int64_t
    integer(c_int32_t), parameter :: MP_MESSAGE_METADATA_BYTES = 256

    ! mp_status_t
    integer(c_int), parameter :: MP_SUCCESS = 0
    integer(c_int), parameter :: MP_ERROR_INVALID_ARGUMENT = 1
    integer(c_int), parameter :: MP_ERROR_INVALID_HANDLE = 2
    integer(c_int), parameter :: MP_ERROR_INVALID_DEVICE = 3
    integer(c_int), parameter :: MP_ERROR_INVALID_POINTER = 4
    integer(c_int), parameter :: MP_ERROR_OVERLAP = 5
    integer(c_int), parameter :: MP_ERROR_NO_ROUTE = 6
    integer(c_int), parameter :: MP_ERROR_OUT_OF_MEMORY = 7
    integer(c_int), parameter :: MP_ERROR_NOT_SUPPORTED = 8
    integer(c_int), parameter :: MP_ERROR_NO_DRIVER = 9
    integer(c_int), parameter :: MP_ERROR_DRIVER = 10
    integer(c_int), parameter :: MP_ERROR_TOPOLOGY = 11
    integer(c_int), parameter :: MP_ERROR_ENVIRONMENT = 12
    integer(c_int), parameter :: MP_ERROR_VERSION_MISMATCH = 13
    integer(c_int), parameter :: MP_ERROR_DATA_CORRUPTION = 14
    integer(c_int), parameter :: MP_ERROR_INTERNAL = 15
    integer(c_int), parameter :: MP_ERROR_PEER_GONE = 16
    integer(c_int), parameter :: MP_ERROR_TIMEOUT = 17
    integer(c_int), parameter :: MP_ERROR_RANK_FAILED = 18
    integer(c_int), parameter :: MP_ERROR_ALLGATHER = 19
    integer(c_int), parameter :: MP_ERROR_MESSAGE_TRUNCATED = 20
    integer(c_int), parameter :: MP_ERROR_CANCELLED = 21
    integer(c_int), parameter :: MP_ERROR_QUEUE_FULL = 22

    ! mp_backend_t
    integer(c_int), parameter :: MP_BACKEND_AUTO = 0
    integer(c_int), parameter :: MP_BACKEND_HOST = 1
    integer(c_int), parameter :: MP_BACKEND_CUDA = 2

    ! mp_engine_t
    integer(c_int), parameter :: MP_ENGINE_AUTO = 0
    integer(c_int), parameter :: MP_ENGINE_STREAM = 1
    integer(c_int), parameter :: MP_ENGINE_GRAPH = 2
    integer(c_int), parameter :: MP_ENGINE_BATCH = 3
    integer(c_int), parameter :: MP_ENGINE_KERNEL = 4

    ! mp_switch_t
    integer(c_int), parameter :: MP_DEFAULT = 0
    integer(c_int), parameter :: MP_ON = 1
    integer(c_int), parameter :: MP_OFF = 2

    ! mp_signal_wait_t
    integer(c_int), parameter :: MP_SIGNAL_WAIT_DEFAULT = 0
    integer(c_int), parameter :: MP_SIGNAL_WAIT_OPERATION = 1
    integer(c_int), parameter :: MP_SIGNAL_WAIT_KERNEL = 2

    ! mp_agent_t
    integer(c_int), parameter :: MP_AGENT_AUTO = 0
    integer(c_int), parameter :: MP_AGENT_COPY_ENGINE = 1
    integer(c_int), parameter :: MP_AGENT_PRODUCER = 2

    ! mp_collective_t
    integer(c_int), parameter :: MP_BROADCAST = 0
    integer(c_int), parameter :: MP_SCATTER = 1
    integer(c_int), parameter :: MP_GATHER = 2
    integer(c_int), parameter :: MP_ALL_GATHER = 3
    integer(c_int), parameter :: MP_ALL_TO_ALL = 4

    ! mp_format_t
    integer(c_int), parameter :: MP_FORMAT_TEXT = 0
    integer(c_int), parameter :: MP_FORMAT_JSON = 1

    ! mp_log_level_t
    integer(c_int), parameter :: MP_LOG_OFF = 0
    integer(c_int), parameter :: MP_LOG_ERROR = 1
    integer(c_int), parameter :: MP_LOG_WARN = 2
    integer(c_int), parameter :: MP_LOG_INFO = 3
    integer(c_int), parameter :: MP_LOG_DEBUG = 4
    integer(c_int), parameter :: MP_LOG_TRACE = 5

    type, bind(c) :: mp_error_info_t
        integer(c_size_t) :: size = 40_c_size_t
        integer(c_int) :: status = 0_c_int
        integer(c_int64_t) :: driver_code = 0_c_int64_t
        type(c_ptr) :: argument = c_null_ptr
        type(c_ptr) :: message = c_null_ptr
    end type mp_error_info_t

    type, bind(c) :: mp_context_options_t
        integer(c_size_t) :: size = 56_c_size_t
        integer(c_int) :: backend = 0_c_int
        type(c_ptr) :: topology = c_null_ptr
        integer(c_int64_t) :: staging_bytes = 0_c_int64_t
        integer(c_int64_t) :: cache_plans = 0_c_int64_t
        integer(c_int) :: signal_wait = 0_c_int
        integer(c_int32_t) :: host_threads = 0_c_int32_t
        integer(c_int64_t) :: cache_graphs = 0_c_int64_t
    end type mp_context_options_t

    type, bind(c) :: mp_statistics_t
        integer(c_size_t) :: size = 128_c_size_t
        integer(c_int64_t) :: plan_cache_hits = 0_c_int64_t
        integer(c_int64_t) :: plan_cache_misses = 0_c_int64_t
        integer(c_int64_t) :: plan_cache_evictions = 0_c_int64_t
        integer(c_int64_t) :: plan_cache_entries = 0_c_int64_t
        integer(c_int64_t) :: executions = 0_c_int64_t
        integer(c_int64_t) :: bytes = 0_c_int64_t
        integer(c_int64_t) :: plan_cache_shape_hits = 0_c_int64_t
        integer(c_int64_t) :: graph_launches = 0_c_int64_t
        integer(c_int64_t) :: graph_hits = 0_c_int64_t
        integer(c_int64_t) :: graph_misses = 0_c_int64_t
        integer(c_int64_t) :: graph_instantiations = 0_c_int64_t
        integer(c_int64_t) :: graph_repoints = 0_c_int64_t
        integer(c_int64_t) :: graph_waits = 0_c_int64_t
        integer(c_int64_t) :: graph_programs = 0_c_int64_t
        integer(c_int64_t) :: graph_entries = 0_c_int64_t
    end type mp_statistics_t

    type, bind(c) :: mp_device_statistics_t
        integer(c_size_t) :: size = 32_c_size_t
        integer(c_int64_t) :: staging_bytes = 0_c_int64_t
        integer(c_int64_t) :: allocated_bytes = 0_c_int64_t
        integer(c_int64_t) :: streams = 0_c_int64_t
    end type mp_device_statistics_t

    type, bind(c) :: mp_transfer_t
        type(c_ptr) :: dst = c_null_ptr
        integer(c_int32_t) :: dst_device = 0_c_int32_t
        type(c_ptr) :: src = c_null_ptr
        integer(c_int32_t) :: src_device = 0_c_int32_t
        integer(c_int64_t) :: bytes = 0_c_int64_t
    end type mp_transfer_t

    type, bind(c) :: mp_plan_options_t
        integer(c_size_t) :: size = 72_c_size_t
        integer(c_int) :: engine = 0_c_int
        integer(c_int32_t) :: max_paths = 0_c_int32_t
        integer(c_int) :: host_path = 0_c_int
        integer(c_int64_t) :: chunk_bytes = 0_c_int64_t
        integer(c_int64_t) :: min_bytes = 0_c_int64_t
        integer(c_int64_t) :: staging_bytes = 0_c_int64_t
        integer(c_int64_t) :: relay_gpus = 0_c_int64_t
        integer(c_int) :: adapt = 0_c_int
        integer(c_int32_t) :: relay_chunks = 0_c_int32_t
        integer(c_int32_t) :: host_chunks = 0_c_int32_t
    end type mp_plan_options_t

    type, bind(c) :: mp_plan_info_t
        integer(c_size_t) :: size = 64_c_size_t
        real(c_double) :: predicted_seconds = 0.0_c_double
        real(c_double) :: direct_seconds = 0.0_c_double
        integer(c_int64_t) :: bytes = 0_c_int64_t
        integer(c_int32_t) :: paths = 0_c_int32_t
        integer(c_int32_t) :: operations = 0_c_int32_t
        integer(c_int64_t) :: staging_bytes = 0_c_int64_t
        real(c_double) :: measured_seconds = 0.0_c_double
        real(c_double) :: measured_direct_seconds = 0.0_c_double
    end type mp_plan_info_t

    type, bind(c) :: mp_piece_t
        integer(c_int32_t) :: from = 0_c_int32_t
        integer(c_int32_t) :: to = 0_c_int32_t
        integer(c_int64_t) :: send_offset = 0_c_int64_t
        integer(c_int64_t) :: receive_offset = 0_c_int64_t
        integer(c_int64_t) :: bytes = 0_c_int64_t
    end type mp_piece_t

    type, bind(c) :: mp_message_info_t
        integer(c_size_t) :: size = 48_c_size_t
        integer(c_int64_t) :: tag = 0_c_int64_t
        integer(c_int64_t) :: bytes = 0_c_int64_t
        integer(c_int32_t) :: rank = 0_c_int32_t
        integer(c_int32_t) :: metadata_bytes = 0_c_int32_t
        type(c_ptr) :: metadata = c_null_ptr
        integer(c_size_t) :: metadata_capacity = 0_c_size_t
    end type mp_message_info_t

    type, bind(c) :: mp_probe_options_t
        integer(c_size_t) :: size = 24_c_size_t
        type(c_ptr) :: file = c_null_ptr
        integer(c_int) :: keep = 0_c_int
        integer(c_int) :: quick = 0_c_int
    end type mp_probe_options_t

    type, bind(c) :: mp_memory_handle_t
        integer(c_int8_t) :: bytes(128) = 0_c_int8_t
    end type mp_memory_handle_t

    type, bind(c) :: mp_signal_t
        type(c_ptr) :: counter = c_null_ptr
        integer(c_int64_t) :: value = 0_c_int64_t
    end type mp_signal_t

    type, bind(c) :: mp_node_options_t
        integer(c_size_t) :: size = 40_c_size_t
        type(c_ptr) :: devices = c_null_ptr
        integer(c_size_t) :: device_count = 0_c_size_t
        type(c_ptr) :: socket = c_null_ptr
        type(c_ptr) :: failure = c_null_ptr
    end type mp_node_options_t

    type, bind(c) :: mp_window_t
        type(c_ptr) :: memory = c_null_ptr
        integer(c_int64_t) :: bytes = 0_c_int64_t
    end type mp_window_t

    type, bind(c) :: mp_node_end_t
        integer(c_int32_t) :: rank = 0_c_int32_t
        integer(c_int32_t) :: window = 0_c_int32_t
        integer(c_int64_t) :: offset = 0_c_int64_t
    end type mp_node_end_t

    type, bind(c) :: mp_node_transfer_t
        type(mp_node_end_t) :: dst = mp_node_end_t()
        type(mp_node_end_t) :: src = mp_node_end_t()
        integer(c_int64_t) :: bytes = 0_c_int64_t
    end type mp_node_transfer_t

    type, bind(c) :: mp_partition_options_t
        integer(c_size_t) :: size = 24_c_size_t
        integer(c_int32_t) :: count = 0_c_int32_t
        integer(c_int) :: agent = 0_c_int
        integer(c_int) :: arrivals = 0_c_int
        integer(c_int) :: stores = 0_c_int
    end type mp_partition_options_t

    type, bind(c) :: mp_trigger_t
        integer(c_size_t) :: size = 64_c_size_t
        type(c_ptr) :: step = c_null_ptr
        type(c_ptr) :: ready = c_null_ptr
        type(c_ptr) :: arrived = c_null_ptr
        type(c_ptr) :: counters = c_null_ptr
        integer(c_int64_t) :: bytes = 0_c_int64_t
        integer(c_int64_t) :: partition_bytes = 0_c_int64_t
        integer(c_int32_t) :: partitions = 0_c_int32_t
        integer(c_int32_t) :: arrived_flags = 0_c_int32_t
    end type mp_trigger_t

    type, bind(c) :: mp_partition_tuning_t
        integer(c_size_t) :: size = 32_c_size_t
        integer(c_int32_t) :: agents = 0_c_int32_t
        integer(c_int32_t) :: rounds = 0_c_int32_t
        integer(c_int) :: arrivals = 0_c_int
        integer(c_int32_t) :: blocks = 0_c_int32_t
        type(c_ptr) :: file = c_null_ptr
    end type mp_partition_tuning_t

    type, bind(c) :: mp_messenger_options_t
        integer(c_size_t) :: size = 16_c_size_t
        integer(c_int32_t) :: operations = 0_c_int32_t
        integer(c_int32_t) :: messages = 0_c_int32_t
    end type mp_messenger_options_t

    type, bind(c) :: mp_message_descriptor_t
        integer(c_int8_t) :: bytes(64) = 0_c_int8_t
    end type mp_message_descriptor_t

    type, bind(c) :: mp_blocks_t
        integer(c_size_t) :: size = 104_c_size_t
        type(c_ptr) :: dst = c_null_ptr
        type(c_ptr) :: src = c_null_ptr
        integer(c_int64_t) :: layers = 0_c_int64_t
        integer(c_int64_t) :: block_bytes = 0_c_int64_t
        integer(c_int64_t) :: count = 0_c_int64_t
        integer(c_int64_t) :: dst_stride = 0_c_int64_t
        integer(c_int64_t) :: src_stride = 0_c_int64_t
        integer(c_int64_t) :: dst_blocks = 0_c_int64_t
        integer(c_int64_t) :: src_blocks = 0_c_int64_t
        type(c_ptr) :: dst_index = c_null_ptr
        type(c_ptr) :: src_index = c_null_ptr
        integer(c_int32_t) :: index_bytes = 8_c_int32_t
        integer(c_int32_t) :: reserved = 0_c_int32_t
    end type mp_blocks_t

    type, bind(c) :: mp_piece_options_t
        integer(c_size_t) :: size = 24_c_size_t
        integer(c_int32_t) :: multiprocessors = 0_c_int32_t
        integer(c_int) :: paced = 0_c_int
        integer(c_int64_t) :: relay_gpus = 0_c_int64_t
    end type mp_piece_options_t

    type, bind(c) :: mp_segment_t
        type(c_ptr) :: dst = c_null_ptr
        type(c_ptr) :: src = c_null_ptr
        integer(c_int64_t) :: bytes = 0_c_int64_t
    end type mp_segment_t

    abstract interface
        subroutine mp_log_callback_t(level, target, message, user) bind(c)
            import
            integer(c_int), value :: level
            type(c_ptr), value :: target
            type(c_ptr), value :: message
            type(c_ptr), value :: user
        end subroutine mp_log_callback_t

        subroutine mp_host_function_t(user) bind(c)
            import
            type(c_ptr), value :: user
        end subroutine mp_host_function_t

        subroutine mp_request_function_t(user, status) bind(c)
            import
            type(c_ptr), value :: user
            integer(c_int), value :: status
        end subroutine mp_request_function_t

        function mp_allgather_t(user, send, receive, bytes) bind(c) result(outcome)
            import
            type(c_ptr), value :: user
            type(c_ptr), value :: send
            type(c_ptr), value :: receive
            integer(c_size_t), value :: bytes
            integer(c_int) :: outcome
        end function mp_allgather_t

        function mp_produce_t(user, triggers, count, stream) bind(c) result(outcome)
            import
            type(c_ptr), value :: user
            type(c_ptr), value :: triggers
            integer(c_size_t), value :: count
            type(c_ptr), value :: stream
            integer(c_int) :: outcome
        end function mp_produce_t
    end interface

    interface
        function mp_version() bind(c, name="mp_version") result(outcome)
            import
            integer(c_int32_t) :: outcome
        end function mp_version

        function mp_version_string() bind(c, name="mp_version_string") result(outcome)
            import
            type(c_ptr) :: outcome
        end function mp_version_string

        function mp_status_string(status) bind(c, name="mp_status_string") result(outcome)
            import
            integer(c_int), value :: status
            type(c_ptr) :: outcome
        end function mp_status_string

        function mp_last_error() bind(c, name="mp_last_error") result(outcome)
            import
            type(c_ptr) :: outcome
        end function mp_last_error

        function mp_last_error_info(info) bind(c, name="mp_last_error_info") result(outcome)
            import
            type(mp_error_info_t), intent(inout), optional :: info
            integer(c_int) :: outcome
        end function mp_last_error_info

        function mp_last_error_set(status, driver_code, argument, message) bind(c, name="mp_last_error_set") &
                result(outcome)
            import
            integer(c_int), value :: status
            integer(c_int64_t), value :: driver_code
            character(kind=c_char), intent(in), optional :: argument(*)
            character(kind=c_char), intent(in), optional :: message(*)
            integer(c_int) :: outcome
        end function mp_last_error_set

        function mp_log_set_callback(max_level, callback, user) bind(c, name="mp_log_set_callback") result(outcome)
            import
            integer(c_int), value :: max_level
            type(c_funptr), value :: callback
            type(c_ptr), value :: user
            integer(c_int) :: outcome
        end function mp_log_set_callback

        function mp_context_create_versioned(options, header_version, context) bind(c, &
                name="mp_context_create_versioned") result(outcome)
            import
            type(mp_context_options_t), intent(in), optional :: options
            integer(c_int32_t), value :: header_version
            type(c_ptr), intent(inout), optional :: context
            integer(c_int) :: outcome
        end function mp_context_create_versioned

        function mp_context_destroy(context) bind(c, name="mp_context_destroy") result(outcome)
            import
            type(c_ptr), value :: context
            integer(c_int) :: outcome
        end function mp_context_destroy

        function mp_context_get_info(context, backend, gpus, host_domains) bind(c, name="mp_context_get_info") &
                result(outcome)
            import
            type(c_ptr), value :: context
            integer(c_int), intent(inout), optional :: backend
            integer(c_int32_t), intent(inout), optional :: gpus
            integer(c_int32_t), intent(inout), optional :: host_domains
            integer(c_int) :: outcome
        end function mp_context_get_info

        function mp_context_describe(context, format, text, capacity, length) bind(c, name="mp_context_describe") &
                result(outcome)
            import
            type(c_ptr), value :: context
            integer(c_int), value :: format
            character(kind=c_char), intent(inout), optional :: text(*)
            integer(c_size_t), value :: capacity
            integer(c_size_t), intent(inout), optional :: length
            integer(c_int) :: outcome
        end function mp_context_describe

        function mp_context_statistics(context, statistics) bind(c, name="mp_context_statistics") result(outcome)
            import
            type(c_ptr), value :: context
            type(mp_statistics_t), intent(inout), optional :: statistics
            integer(c_int) :: outcome
        end function mp_context_statistics

        function mp_context_device_statistics(context, device, statistics) bind(c, name="mp_context_device_statistics") &
                result(outcome)
            import
            type(c_ptr), value :: context
            integer(c_int32_t), value :: device
            type(mp_device_statistics_t), intent(inout), optional :: statistics
            integer(c_int) :: outcome
        end function mp_context_device_statistics

        function mp_alloc(context, device, bytes, memory) bind(c, name="mp_alloc") result(outcome)
            import
            type(c_ptr), value :: context
            integer(c_int32_t), value :: device
            integer(c_int64_t), value :: bytes
            type(c_ptr), intent(inout), optional :: memory
            integer(c_int) :: outcome
        end function mp_alloc

        function mp_alloc_shared(context, device, bytes, memory) bind(c, name="mp_alloc_shared") result(outcome)
            import
            type(c_ptr), value :: context
            integer(c_int32_t), value :: device
            integer(c_int64_t), value :: bytes
            type(c_ptr), intent(inout), optional :: memory
            integer(c_int) :: outcome
        end function mp_alloc_shared

        function mp_free(context, memory) bind(c, name="mp_free") result(outcome)
            import
            type(c_ptr), value :: context
            type(c_ptr), value :: memory
            integer(c_int) :: outcome
        end function mp_free

        function mp_free_async(context, memory, stream) bind(c, name="mp_free_async") result(outcome)
            import
            type(c_ptr), value :: context
            type(c_ptr), value :: memory
            type(c_ptr), value :: stream
            integer(c_int) :: outcome
        end function mp_free_async

        function mp_memory_register(context, pointer, bytes, huge_pages) bind(c, name="mp_memory_register") &
                result(outcome)
            import
            type(c_ptr), value :: context
            type(c_ptr), value :: pointer
            integer(c_int64_t), value :: bytes
            integer(c_int32_t), value :: huge_pages
            integer(c_int) :: outcome
        end function mp_memory_register

        function mp_memory_unregister(context, pointer) bind(c, name="mp_memory_unregister") result(outcome)
            import
            type(c_ptr), value :: context
            type(c_ptr), value :: pointer
            integer(c_int) :: outcome
        end function mp_memory_unregister

        function mp_file_map(context, descriptor, bypass_cache, data, bytes) bind(c, name="mp_file_map") result(outcome)
            import
            type(c_ptr), value :: context
            integer(c_int32_t), value :: descriptor
            integer(c_int32_t), value :: bypass_cache
            type(c_ptr), intent(in), optional :: data
            integer(c_int64_t), intent(inout), optional :: bytes
            integer(c_int) :: outcome
        end function mp_file_map

        function mp_file_unmap(context, data) bind(c, name="mp_file_unmap") result(outcome)
            import
            type(c_ptr), value :: context
            type(c_ptr), value :: data
            integer(c_int) :: outcome
        end function mp_file_unmap

        function mp_stream_create(context, device, stream) bind(c, name="mp_stream_create") result(outcome)
            import
            type(c_ptr), value :: context
            integer(c_int32_t), value :: device
            type(c_ptr), intent(inout), optional :: stream
            integer(c_int) :: outcome
        end function mp_stream_create

        function mp_stream_destroy(context, stream) bind(c, name="mp_stream_destroy") result(outcome)
            import
            type(c_ptr), value :: context
            type(c_ptr), value :: stream
            integer(c_int) :: outcome
        end function mp_stream_destroy

        function mp_stream_synchronize(context, stream) bind(c, name="mp_stream_synchronize") result(outcome)
            import
            type(c_ptr), value :: context
            type(c_ptr), value :: stream
            integer(c_int) :: outcome
        end function mp_stream_synchronize

        function mp_stream_get_info(context, stream, device, capturing) bind(c, name="mp_stream_get_info") &
                result(outcome)
            import
            type(c_ptr), value :: context
            type(c_ptr), value :: stream
            integer(c_int32_t), intent(inout), optional :: device
            integer(c_int32_t), intent(inout), optional :: capturing
            integer(c_int) :: outcome
        end function mp_stream_get_info

        function mp_stream_launch_host(context, stream, function, user, release) bind(c, name="mp_stream_launch_host") &
                result(outcome)
            import
            type(c_ptr), value :: context
            type(c_ptr), value :: stream
            type(c_funptr), value :: function
            type(c_ptr), value :: user
            type(c_funptr), value :: release
            integer(c_int) :: outcome
        end function mp_stream_launch_host

        function mp_event_create(context, event) bind(c, name="mp_event_create") result(outcome)
            import
            type(c_ptr), value :: context
            type(c_ptr), intent(inout), optional :: event
            integer(c_int) :: outcome
        end function mp_event_create

        function mp_event_destroy(context, event) bind(c, name="mp_event_destroy") result(outcome)
            import
            type(c_ptr), value :: context
            type(c_ptr), value :: event
            integer(c_int) :: outcome
        end function mp_event_destroy

        function mp_event_record(context, event, stream) bind(c, name="mp_event_record") result(outcome)
            import
            type(c_ptr), value :: context
            type(c_ptr), value :: event
            type(c_ptr), value :: stream
            integer(c_int) :: outcome
        end function mp_event_record

        function mp_event_synchronize(context, event) bind(c, name="mp_event_synchronize") result(outcome)
            import
            type(c_ptr), value :: context
            type(c_ptr), value :: event
            integer(c_int) :: outcome
        end function mp_event_synchronize

        function mp_stream_wait_event(context, stream, event) bind(c, name="mp_stream_wait_event") result(outcome)
            import
            type(c_ptr), value :: context
            type(c_ptr), value :: stream
            type(c_ptr), value :: event
            integer(c_int) :: outcome
        end function mp_stream_wait_event

        function mp_plan(context, transfers, count, options, plan) bind(c, name="mp_plan") result(outcome)
            import
            type(c_ptr), value :: context
            type(mp_transfer_t), intent(in), optional :: transfers(*)
            integer(c_size_t), value :: count
            type(mp_plan_options_t), intent(in), optional :: options
            type(c_ptr), intent(inout), optional :: plan
            integer(c_int) :: outcome
        end function mp_plan

        function mp_plan_destroy(plan) bind(c, name="mp_plan_destroy") result(outcome)
            import
            type(c_ptr), value :: plan
            integer(c_int) :: outcome
        end function mp_plan_destroy

        function mp_plan_describe(plan, format, text, capacity, length) bind(c, name="mp_plan_describe") result(outcome)
            import
            type(c_ptr), value :: plan
            integer(c_int), value :: format
            character(kind=c_char), intent(inout), optional :: text(*)
            integer(c_size_t), value :: capacity
            integer(c_size_t), intent(inout), optional :: length
            integer(c_int) :: outcome
        end function mp_plan_describe

        function mp_plan_get_info(plan, info) bind(c, name="mp_plan_get_info") result(outcome)
            import
            type(c_ptr), value :: plan
            type(mp_plan_info_t), intent(inout), optional :: info
            integer(c_int) :: outcome
        end function mp_plan_get_info

        function mp_plan_prepare(plan, stream) bind(c, name="mp_plan_prepare") result(outcome)
            import
            type(c_ptr), value :: plan
            type(c_ptr), value :: stream
            integer(c_int) :: outcome
        end function mp_plan_prepare

        function mp_execute(plan, stream, request) bind(c, name="mp_execute") result(outcome)
            import
            type(c_ptr), value :: plan
            type(c_ptr), value :: stream
            type(c_ptr), intent(inout), optional :: request
            integer(c_int) :: outcome
        end function mp_execute

        function mp_collective(collective, participants, root, bytes, sizes, pieces, capacity, count) bind(c, &
                name="mp_collective") result(outcome)
            import
            integer(c_int), value :: collective
            integer(c_int32_t), value :: participants
            integer(c_int32_t), value :: root
            integer(c_int64_t), value :: bytes
            integer(c_int64_t), intent(in), optional :: sizes
            type(mp_piece_t), intent(inout), optional :: pieces(*)
            integer(c_size_t), value :: capacity
            integer(c_size_t), intent(inout), optional :: count
            integer(c_int) :: outcome
        end function mp_collective

        function mp_wait(request, info) bind(c, name="mp_wait") result(outcome)
            import
            type(c_ptr), intent(inout), optional :: request
            type(mp_message_info_t), intent(inout), optional :: info
            integer(c_int) :: outcome
        end function mp_wait

        function mp_test(request, done, info) bind(c, name="mp_test") result(outcome)
            import
            type(c_ptr), intent(inout), optional :: request
            integer(c_int32_t), intent(inout), optional :: done
            type(mp_message_info_t), intent(inout), optional :: info
            integer(c_int) :: outcome
        end function mp_test

        function mp_request_destroy(request) bind(c, name="mp_request_destroy") result(outcome)
            import
            type(c_ptr), intent(inout), optional :: request
            integer(c_int) :: outcome
        end function mp_request_destroy

        function mp_request_cancel(request, cancelled) bind(c, name="mp_request_cancel") result(outcome)
            import
            type(c_ptr), value :: request
            integer(c_int32_t), intent(inout), optional :: cancelled
            integer(c_int) :: outcome
        end function mp_request_cancel

        function mp_stream_wait_request(stream, request) bind(c, name="mp_stream_wait_request") result(outcome)
            import
            type(c_ptr), value :: stream
            type(c_ptr), value :: request
            integer(c_int) :: outcome
        end function mp_stream_wait_request

        function mp_request_set_callback(request, function, user) bind(c, name="mp_request_set_callback") &
                result(outcome)
            import
            type(c_ptr), value :: request
            type(c_funptr), value :: function
            type(c_ptr), value :: user
            integer(c_int) :: outcome
        end function mp_request_set_callback

        function mp_context_probe(context, options) bind(c, name="mp_context_probe") result(outcome)
            import
            type(c_ptr), value :: context
            type(mp_probe_options_t), intent(in), optional :: options
            integer(c_int) :: outcome
        end function mp_context_probe

        function mp_context_probed(context, text, capacity, length) bind(c, name="mp_context_probed") result(outcome)
            import
            type(c_ptr), value :: context
            character(kind=c_char), intent(inout), optional :: text(*)
            integer(c_size_t), value :: capacity
            integer(c_size_t), intent(inout), optional :: length
            integer(c_int) :: outcome
        end function mp_context_probed

        function mp_memory_export(context, pointer, bytes, handle) bind(c, name="mp_memory_export") result(outcome)
            import
            type(c_ptr), value :: context
            type(c_ptr), value :: pointer
            integer(c_int64_t), value :: bytes
            type(mp_memory_handle_t), intent(inout), optional :: handle
            integer(c_int) :: outcome
        end function mp_memory_export

        function mp_memory_import(context, handle, kernels, pointer, device, in_kernels, bytes) bind(c, &
                name="mp_memory_import") result(outcome)
            import
            type(c_ptr), value :: context
            type(mp_memory_handle_t), intent(in), optional :: handle
            integer(c_int32_t), value :: kernels
            type(c_ptr), intent(inout), optional :: pointer
            integer(c_int32_t), intent(inout), optional :: device
            type(c_ptr), intent(inout), optional :: in_kernels
            integer(c_int64_t), intent(inout), optional :: bytes
            integer(c_int) :: outcome
        end function mp_memory_import

        function mp_memory_adopt(context, pointer, bytes, device, ipc_handle) bind(c, name="mp_memory_adopt") &
                result(outcome)
            import
            type(c_ptr), value :: context
            type(c_ptr), value :: pointer
            integer(c_int64_t), value :: bytes
            integer(c_int32_t), value :: device
            type(c_ptr), value :: ipc_handle
            integer(c_int) :: outcome
        end function mp_memory_adopt

        function mp_memory_close(context, pointer) bind(c, name="mp_memory_close") result(outcome)
            import
            type(c_ptr), value :: context
            type(c_ptr), value :: pointer
            integer(c_int) :: outcome
        end function mp_memory_close

        function mp_memory_leave(context, pointer, value) bind(c, name="mp_memory_leave") result(outcome)
            import
            type(c_ptr), value :: context
            type(c_ptr), value :: pointer
            integer(c_int64_t), value :: value
            integer(c_int) :: outcome
        end function mp_memory_leave

        function mp_device_uuid(context, device, uuid) bind(c, name="mp_device_uuid") result(outcome)
            import
            type(c_ptr), value :: context
            integer(c_int32_t), value :: device
            integer(c_int8_t), intent(inout), optional :: uuid(*)
            integer(c_int) :: outcome
        end function mp_device_uuid

        function mp_stream_wait_signals(context, stream, signals, count) bind(c, name="mp_stream_wait_signals") &
                result(outcome)
            import
            type(c_ptr), value :: context
            type(c_ptr), value :: stream
            type(mp_signal_t), intent(in), optional :: signals(*)
            integer(c_size_t), value :: count
            integer(c_int) :: outcome
        end function mp_stream_wait_signals

        function mp_kernel_wait_signals(context, signals, count) bind(c, name="mp_kernel_wait_signals") result(outcome)
            import
            type(c_ptr), value :: context
            type(mp_signal_t), intent(in), optional :: signals(*)
            integer(c_size_t), value :: count
            integer(c_int) :: outcome
        end function mp_kernel_wait_signals

        function mp_stream_raise_signals(context, stream, signals, count) bind(c, name="mp_stream_raise_signals") &
                result(outcome)
            import
            type(c_ptr), value :: context
            type(c_ptr), value :: stream
            type(mp_signal_t), intent(in), optional :: signals(*)
            integer(c_size_t), value :: count
            integer(c_int) :: outcome
        end function mp_stream_raise_signals

        function mp_signal_raise(context, counter, value) bind(c, name="mp_signal_raise") result(outcome)
            import
            type(c_ptr), value :: context
            type(c_ptr), value :: counter
            integer(c_int64_t), value :: value
            integer(c_int) :: outcome
        end function mp_signal_raise

        function mp_signal_read(context, counter, value) bind(c, name="mp_signal_read") result(outcome)
            import
            type(c_ptr), value :: context
            type(c_ptr), value :: counter
            integer(c_int64_t), intent(inout), optional :: value
            integer(c_int) :: outcome
        end function mp_signal_read

        function mp_signal_test(context, counter, value, reached) bind(c, name="mp_signal_test") result(outcome)
            import
            type(c_ptr), value :: context
            type(c_ptr), value :: counter
            integer(c_int64_t), value :: value
            integer(c_int32_t), intent(inout), optional :: reached
            integer(c_int) :: outcome
        end function mp_signal_test

        function mp_signal_synchronize(context, counter, value, seconds) bind(c, name="mp_signal_synchronize") &
                result(outcome)
            import
            type(c_ptr), value :: context
            type(c_ptr), value :: counter
            integer(c_int64_t), value :: value
            real(c_double), value :: seconds
            integer(c_int) :: outcome
        end function mp_signal_synchronize

        function mp_node_create(context, rank, ranks, allgather, user, options, node) bind(c, name="mp_node_create") &
                result(outcome)
            import
            type(c_ptr), value :: context
            integer(c_int32_t), value :: rank
            integer(c_int32_t), value :: ranks
            type(c_funptr), value :: allgather
            type(c_ptr), value :: user
            type(mp_node_options_t), intent(in), optional :: options
            type(c_ptr), intent(inout), optional :: node
            integer(c_int) :: outcome
        end function mp_node_create

        function mp_node_fail(node, reason) bind(c, name="mp_node_fail") result(outcome)
            import
            type(c_ptr), value :: node
            character(kind=c_char), intent(in), optional :: reason(*)
            integer(c_int) :: outcome
        end function mp_node_fail

        function mp_node_allgather(node, call, send, receive, bytes) bind(c, name="mp_node_allgather") result(outcome)
            import
            type(c_ptr), value :: node
            character(kind=c_char), intent(in), optional :: call(*)
            type(c_ptr), value :: send
            type(c_ptr), value :: receive
            integer(c_size_t), value :: bytes
            integer(c_int) :: outcome
        end function mp_node_allgather

        function mp_node_devices(node, devices, capacity, count) bind(c, name="mp_node_devices") result(outcome)
            import
            type(c_ptr), value :: node
            integer(c_int32_t), intent(inout), optional :: devices(*)
            integer(c_size_t), value :: capacity
            integer(c_size_t), intent(inout), optional :: count
            integer(c_int) :: outcome
        end function mp_node_devices

        function mp_node_device(node, device) bind(c, name="mp_node_device") result(outcome)
            import
            type(c_ptr), value :: node
            integer(c_int32_t), intent(inout), optional :: device
            integer(c_int) :: outcome
        end function mp_node_device

        function mp_node_destroy(node) bind(c, name="mp_node_destroy") result(outcome)
            import
            type(c_ptr), value :: node
            integer(c_int) :: outcome
        end function mp_node_destroy

        function mp_node_plan(node, windows, window_count, transfers, count, partitions, options, plan) bind(c, &
                name="mp_node_plan") result(outcome)
            import
            type(c_ptr), value :: node
            type(mp_window_t), intent(in), optional :: windows(*)
            integer(c_size_t), value :: window_count
            type(mp_node_transfer_t), intent(in), optional :: transfers(*)
            integer(c_size_t), value :: count
            type(mp_partition_options_t), intent(in), optional :: partitions
            type(mp_plan_options_t), intent(in), optional :: options
            type(c_ptr), intent(inout), optional :: plan
            integer(c_int) :: outcome
        end function mp_node_plan

        function mp_node_tune_partitions(node, windows, window_count, transfers, count, produce, user, tuning, options, &
                best) bind(c, name="mp_node_tune_partitions") result(outcome)
            import
            type(c_ptr), value :: node
            type(mp_window_t), intent(in), optional :: windows(*)
            integer(c_size_t), value :: window_count
            type(mp_node_transfer_t), intent(in), optional :: transfers(*)
            integer(c_size_t), value :: count
            type(c_funptr), value :: produce
            type(c_ptr), value :: user
            type(mp_partition_tuning_t), intent(in), optional :: tuning
            type(mp_plan_options_t), intent(in), optional :: options
            type(mp_partition_options_t), intent(inout), optional :: best
            integer(c_int) :: outcome
        end function mp_node_tune_partitions

        function mp_plan_arm(plan, stream) bind(c, name="mp_plan_arm") result(outcome)
            import
            type(c_ptr), value :: plan
            type(c_ptr), value :: stream
            integer(c_int) :: outcome
        end function mp_plan_arm

        function mp_plan_get_trigger(plan, rank, transfer, trigger) bind(c, name="mp_plan_get_trigger") result(outcome)
            import
            type(c_ptr), value :: plan
            integer(c_int32_t), value :: rank
            integer(c_size_t), value :: transfer
            type(mp_trigger_t), intent(inout), optional :: trigger
            integer(c_int) :: outcome
        end function mp_plan_get_trigger

        function mp_plan_synchronize(plan, seconds) bind(c, name="mp_plan_synchronize") result(outcome)
            import
            type(c_ptr), value :: plan
            real(c_double), value :: seconds
            integer(c_int) :: outcome
        end function mp_plan_synchronize

        function mp_messenger_create(node, options, messenger) bind(c, name="mp_messenger_create") result(outcome)
            import
            type(c_ptr), value :: node
            type(mp_messenger_options_t), intent(in), optional :: options
            type(c_ptr), intent(inout), optional :: messenger
            integer(c_int) :: outcome
        end function mp_messenger_create

        function mp_messenger_destroy(messenger) bind(c, name="mp_messenger_destroy") result(outcome)
            import
            type(c_ptr), value :: messenger
            integer(c_int) :: outcome
        end function mp_messenger_destroy

        function mp_send(messenger, data, bytes, rank, tag, metadata, metadata_bytes, stream, request) bind(c, &
                name="mp_send") result(outcome)
            import
            type(c_ptr), value :: messenger
            type(c_ptr), value :: data
            integer(c_int64_t), value :: bytes
            integer(c_int32_t), value :: rank
            integer(c_int64_t), value :: tag
            type(c_ptr), value :: metadata
            integer(c_size_t), value :: metadata_bytes
            type(c_ptr), value :: stream
            type(c_ptr), intent(inout), optional :: request
            integer(c_int) :: outcome
        end function mp_send

        function mp_receive(messenger, data, bytes, rank, tag, mask, stream, request) bind(c, name="mp_receive") &
                result(outcome)
            import
            type(c_ptr), value :: messenger
            type(c_ptr), value :: data
            integer(c_int64_t), value :: bytes
            integer(c_int32_t), value :: rank
            integer(c_int64_t), value :: tag
            integer(c_int64_t), value :: mask
            type(c_ptr), value :: stream
            type(c_ptr), intent(inout), optional :: request
            integer(c_int) :: outcome
        end function mp_receive

        function mp_message_probe(messenger, rank, tag, mask, found, info) bind(c, name="mp_message_probe") &
                result(outcome)
            import
            type(c_ptr), value :: messenger
            integer(c_int32_t), value :: rank
            integer(c_int64_t), value :: tag
            integer(c_int64_t), value :: mask
            integer(c_int32_t), intent(inout), optional :: found
            type(mp_message_info_t), intent(inout), optional :: info
            integer(c_int) :: outcome
        end function mp_message_probe

        function mp_message_get_info(request, matched, info) bind(c, name="mp_message_get_info") result(outcome)
            import
            type(c_ptr), value :: request
            integer(c_int32_t), intent(inout), optional :: matched
            type(mp_message_info_t), intent(inout), optional :: info
            integer(c_int) :: outcome
        end function mp_message_get_info

        function mp_message_describe(messenger, data, bytes, stream, descriptor, released) bind(c, &
                name="mp_message_describe") result(outcome)
            import
            type(c_ptr), value :: messenger
            type(c_ptr), value :: data
            integer(c_int64_t), value :: bytes
            type(c_ptr), value :: stream
            type(mp_message_descriptor_t), intent(inout), optional :: descriptor
            type(c_ptr), intent(inout), optional :: released
            integer(c_int) :: outcome
        end function mp_message_describe

        function mp_message_fetch(messenger, descriptor, data, bytes, stream, request) bind(c, name="mp_message_fetch") &
                result(outcome)
            import
            type(c_ptr), value :: messenger
            type(mp_message_descriptor_t), intent(in), optional :: descriptor
            type(c_ptr), value :: data
            integer(c_int64_t), value :: bytes
            type(c_ptr), value :: stream
            type(c_ptr), intent(inout), optional :: request
            integer(c_int) :: outcome
        end function mp_message_fetch

        function mp_copy_blocks(context, blocks, options, stream, request) bind(c, name="mp_copy_blocks") &
                result(outcome)
            import
            type(c_ptr), value :: context
            type(mp_blocks_t), intent(in), optional :: blocks
            type(mp_piece_options_t), intent(in), optional :: options
            type(c_ptr), value :: stream
            type(c_ptr), intent(inout), optional :: request
            integer(c_int) :: outcome
        end function mp_copy_blocks

        function mp_copy_pieces(context, pieces, count, options, stream, request) bind(c, name="mp_copy_pieces") &
                result(outcome)
            import
            type(c_ptr), value :: context
            type(mp_segment_t), intent(in), optional :: pieces(*)
            integer(c_size_t), value :: count
            type(mp_piece_options_t), intent(in), optional :: options
            type(c_ptr), value :: stream
            type(c_ptr), intent(inout), optional :: request
            integer(c_int) :: outcome
        end function mp_copy_pieces
    end interface
end module mpgpu_c
