package inboxamqp

import (
	"errors"
	"fmt"
	"reflect"
	"strings"

	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"
)

// Metadata that Unmarshal sets from what the broker says about a delivery. It is read-only: Marshal
// never writes it, so forwarding a message, for example to a poison queue, does not repeat it.
// A publisher can forge the x- headers of a first delivery; use them for logs and limits, not for trust.
//
// Read-only in the same way, under the names that the broker gives them: x-first-death-*, x-last-death-*,
// x-received-from, x-shovelled*, x-stream-offset, CC and BCC. Publish CC and BCC through
// PostprocessPublishing: RabbitMQ closes the channel of a publisher that sends them as strings.
const (
	// RedeliveredKey is "true" when the broker has delivered the message before, otherwise absent.
	// A first delivery thus has exactly the metadata that was published.
	RedeliveredKey = "amqp_redelivered"

	// DeliveryCountKey is the number of failed deliveries before this one, as a decimal. Quorum queues
	// set it on redeliveries, classic queues never do. From RabbitMQ 4.3 on it does not count the nacks
	// that Watermill sends; see AcquiredCountKey.
	DeliveryCountKey = "x-delivery-count"

	// AcquiredCountKey is how often the message was handed to a consumer before, as a decimal.
	// Quorum queues of RabbitMQ 4.3 and later set it on redeliveries.
	AcquiredCountKey = "x-acquired-count"

	// DeathKey is a JSON list, latest first, of the queues that dead-lettered the message and why.
	DeathKey = "x-death"
)

var (
	// ErrNoDelivery is returned by Marshaler.Unmarshal for the zero amqp091.Delivery. The subscriber of
	// watermill-amqp reads one from a consumer that the broker or a lost connection has ended, and would
	// hand it to a handler as a message. The error makes it log, drop the channel and consume again.
	ErrNoDelivery = errors.New("inboxamqp: not a delivery: the consumer has ended")

	// ErrHeaderName is returned by Marshaler.Marshal, and by Publish, for a metadata key longer than
	// 255 bytes. The client library would send such a name cut to its length modulo 256.
	ErrHeaderName = errors.New("inboxamqp: header name is longer than 255 bytes")
)

var _ amqp.Marshaler = Marshaler{}

// Marshaler converts between Watermill messages and AMQP messages. It understands every message that
// amqp.DefaultMarshaler writes and the other way round, and in addition every message of publishers that
// do not use Watermill and every header that RabbitMQ adds. The zero value is ready to use.
// It is safe for concurrent use if PostprocessPublishing is.
//
// AMQP properties other than message-id are neither read nor written: embed Marshaler to read them,
// use PostprocessPublishing to write them.
type Marshaler struct {
	// MessageUUIDHeaderKey is the header that holds the message UUID.
	// Default: "_watermill_message_uuid", as with amqp.DefaultMarshaler.
	MessageUUIDHeaderKey string

	// NotPersistentDeliveryMode publishes transient messages, which a broker restart loses.
	// Default: false, messages are persistent.
	NotPersistentDeliveryMode bool

	// PostprocessPublishing may change what Marshal returns, for example set ContentType.
	// Default: nil, nothing is changed.
	PostprocessPublishing func(amqp091.Publishing) amqp091.Publishing
}

// Marshal writes the metadata as headers, without the read-only keys, and the UUID as a header. The UUID is
// also the AMQP message-id when it has 1 to 255 bytes: the client library would cut a longer one, and
// different messages could end up with the same id. It returns ErrHeaderName for a key that AMQP cannot carry.
func (m Marshaler) Marshal(msg *message.Message) (amqp091.Publishing, error) {
	headers := make(amqp091.Table, len(msg.Metadata)+1)
	for key, value := range msg.Metadata {
		if !readOnly(key) {
			headers[key] = value
		}
	}
	headers[m.uuidHeader()] = msg.UUID

	for key := range headers {
		if len(key) > maxShortString {
			return amqp091.Publishing{}, fmt.Errorf("%w: it has %d and begins with %q", ErrHeaderName, len(key), key[:32])
		}
	}

	publishing := amqp091.Publishing{Headers: headers, Body: msg.Payload}
	if len(msg.UUID) <= maxShortString {
		publishing.MessageId = msg.UUID
	}
	if !m.NotPersistentDeliveryMode {
		publishing.DeliveryMode = amqp091.Persistent
	}
	if m.PostprocessPublishing != nil {
		publishing = m.PostprocessPublishing(publishing)
	}
	return publishing, nil
}

// Unmarshal takes the UUID from the UUID header if that is a non-empty string or byte string, otherwise from
// the AMQP message-id, otherwise it is empty; the inbox refuses messages with an empty one.
// A UUID header of another type is not an identity: true, 1.5 or a truncated counter would be shared by
// different messages, and the inbox would take the second for a copy of the first. Such a header stays
// in the metadata under its name, for those who know that their publisher's numbers are unique.
//
// All other headers become metadata. Strings and byte strings keep their bytes, whatever those are. Integers,
// floats, decimals and booleans are written as in Go source, a timestamp in RFC 3339 and UTC, nil as the
// empty string, lists and tables as JSON with sorted keys, in which invalid UTF-8 is replaced by U+FFFD.
//
// The only error is ErrNoDelivery: whatever the broker delivers reaches the handler.
func (m Marshaler) Unmarshal(delivery amqp091.Delivery) (*message.Message, error) {
	if delivery.Acknowledger == nil && reflect.ValueOf(delivery).IsZero() {
		return nil, ErrNoDelivery
	}

	msg := message.NewMessage(delivery.MessageId, delivery.Body)
	msg.Metadata = make(message.Metadata, len(delivery.Headers)+1)

	for key, value := range delivery.Headers {
		if key != m.uuidHeader() {
			msg.Metadata[key] = render(value)
			continue
		}
		id, isText := text(value)
		switch {
		case !isText:
			msg.Metadata[key] = render(value)
		case id != "":
			msg.UUID = id
		}
	}

	// The flag of the delivery wins over a header that happens to have its name.
	delete(msg.Metadata, RedeliveredKey)
	if delivery.Redelivered {
		msg.Metadata[RedeliveredKey] = "true"
	}
	return msg, nil
}

func (m Marshaler) uuidHeader() string {
	if m.MessageUUIDHeaderKey != "" {
		return m.MessageUUIDHeaderKey
	}
	return amqp.DefaultMessageUUIDHeaderKey
}

// maxShortString is the limit, in bytes, of header names and of the message-id.
const maxShortString = 255

// readOnly tells whether only the broker may set the header. A stale x-death confuses the count of the next
// dead-lettering, a stale x-received-from the loop detection of federation, CC and BCC route.
func readOnly(key string) bool {
	switch key {
	case RedeliveredKey, DeliveryCountKey, AcquiredCountKey, DeathKey,
		"x-received-from", "x-stream-offset", "CC", "BCC":
		return true
	}
	return strings.HasPrefix(key, "x-first-death-") ||
		strings.HasPrefix(key, "x-last-death-") ||
		strings.HasPrefix(key, "x-shovelled")
}
