package inboxamqp_test

import (
	"errors"
	"maps"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"

	inboxamqp "github.com/devmappa/watermill-inbox/amqp"
)

// field builds a header value of any AMQP type, nested ones included.
func field(kind uint8, number int64, text string) any {
	switch kind % 17 {
	case 0:
		return text
	case 1:
		return []byte(text)
	case 2:
		return nil
	case 3:
		return number%2 == 0
	case 4:
		return uint8(number)
	case 5:
		return int8(number)
	case 6:
		return int16(number)
	case 7:
		return int32(number)
	case 8:
		return number
	case 9:
		return math.Float32frombits(uint32(number))
	case 10:
		return math.Float64frombits(uint64(number))
	case 11:
		return amqp091.Decimal{Scale: kind, Value: int32(number)}
	case 12:
		return time.Unix(number, 0)
	case 13:
		return []any{}
	case 14:
		return amqp091.Table{}
	case 15:
		return []any{text, field(kind/17, number, text), number}
	default:
		return amqp091.Table{"b": text, text: field(kind/17, number, text), "a": number}
	}
}

// brokersOwn reports whether a header is the broker's, and thus not sent, however long its name is.
func brokersOwn(key string) bool {
	for _, name := range []string{inboxamqp.RedeliveredKey, "x-delivery-count", "x-acquired-count", "x-death", "x-received-from", "x-stream-offset", "CC", "BCC"} {
		if key == name {
			return true
		}
	}
	return strings.HasPrefix(key, "x-first-death-") || strings.HasPrefix(key, "x-last-death-") || strings.HasPrefix(key, "x-shovelled")
}

// FuzzUnmarshal: whatever is delivered becomes a message, always the same one, and can be forwarded.
func FuzzUnmarshal(f *testing.F) {
	for kind := range uint8(255) {
		f.Add(kind, int64(kind)-3, "text", kind, "x-key", "message-id", kind%2 == 0, []byte("body"))
	}
	f.Add(uint8(0), int64(0), "", uint8(0), "", "", false, []byte(nil))
	f.Add(uint8(0), int64(math.MinInt64), "a\x00\xff", uint8(15), uuidHeader, "\xff\x00", true, []byte{0})
	f.Add(uint8(16), int64(math.MaxInt64), "x-death", uint8(16), "x-death", "m", true, []byte("body"))
	f.Add(uint8(1), int64(1), "t", uint8(0), inboxamqp.RedeliveredKey, "m", true, []byte("body"))
	f.Add(uint8(1), int64(1), "t", uint8(0), "CC", "m", true, []byte("body"))

	f.Fuzz(func(t *testing.T, kind uint8, number int64, text string, uuidKind uint8, key, messageID string, redelivered bool, body []byte) {
		t.Parallel()
		delivery := deliver(amqp091.Publishing{MessageId: messageID, Body: body, Headers: amqp091.Table{
			uuidHeader: field(uuidKind, number, text),
			key:        field(kind, number, text), // may replace the UUID header
		}})
		delivery.Redelivered = redelivered

		msg := unmarshal(t, inboxamqp.Marshaler{}, delivery)
		if again := unmarshal(t, inboxamqp.Marshaler{}, delivery); !msg.Equals(again) {
			t.Fatalf("a redelivery differs: %q %q, then %q %q", msg.UUID, msg.Metadata, again.UUID, again.Metadata)
		}

		id := messageID
		switch header := delivery.Headers[uuidHeader].(type) {
		case string:
			if header != "" {
				id = header
			}
		case []byte:
			if len(header) > 0 {
				id = string(header)
			}
		}
		if msg.UUID != id {
			t.Fatalf("UUID %q, want %q", msg.UUID, id)
		}
		if got := msg.Metadata.Get(inboxamqp.RedeliveredKey) == "true"; got != redelivered {
			t.Fatalf("redelivered %t, want %t", got, redelivered)
		}
		if s, ok := delivery.Headers[key].(string); ok && key != uuidHeader && key != inboxamqp.RedeliveredKey && msg.Metadata[key] != s {
			t.Fatalf("header %q became %q", s, msg.Metadata[key])
		}

		publishing, err := inboxamqp.Marshaler{}.Marshal(msg)
		if len(key) > 255 && !brokersOwn(key) {
			if !errors.Is(err, inboxamqp.ErrHeaderName) {
				t.Fatalf("header name of %d bytes: %v", len(key), err)
			}
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		if len(publishing.MessageId) > 255 {
			t.Fatalf("message-id of %d bytes", len(publishing.MessageId))
		}
		if err := publishing.Headers.Validate(); err != nil {
			t.Fatal(err)
		}
		want := maps.Clone(msg.Metadata)
		maps.DeleteFunc(want, func(key, _ string) bool { return brokersOwn(key) || key == uuidHeader })
		forwarded := unmarshal(t, inboxamqp.Marshaler{}, deliver(publishing))
		if forwarded.UUID != msg.UUID || !maps.Equal(forwarded.Metadata, want) {
			t.Fatalf("%q %q became %q %q when forwarded", msg.UUID, msg.Metadata, forwarded.UUID, forwarded.Metadata)
		}
	})
}

// FuzzRoundTrip: messages survive between this marshaler and itself, and the default one in both directions.
func FuzzRoundTrip(f *testing.F) {
	f.Add("id", "key", "value", []byte("body"))
	f.Add("", "", "", []byte(nil))
	f.Add("a\x00b", "\xff\xfe", "\xed\xa0\x80", []byte{0xff})
	f.Add("id", uuidHeader, "metadata under the name of the UUID header", []byte("body"))
	f.Add("id", "x-tenant", "t", []byte("body"))
	f.Add(string(make([]byte, 255)), string(make([]byte, 255)), string(make([]byte, 300)), make([]byte, 300))
	f.Add(string(make([]byte, 256)), "key", "value", []byte("body"))
	f.Add(string(make([]byte, 300)), string(make([]byte, 256)), "value", []byte("body"))

	f.Fuzz(func(t *testing.T, id, key, value string, body []byte) {
		t.Parallel()
		msg := message.NewMessage(id, body)
		msg.Metadata.Set(key, value)
		msg.Metadata.Set("other", "x")

		if len(key) > 255 && !brokersOwn(key) {
			if _, err := (inboxamqp.Marshaler{}).Marshal(msg); !errors.Is(err, inboxamqp.ErrHeaderName) {
				t.Fatalf("key of %d bytes: %v", len(key), err)
			}
			return
		}

		want := maps.Clone(msg.Metadata)
		delete(want, uuidHeader)
		ours, theirs := amqp.Marshaler(inboxamqp.Marshaler{}), amqp.Marshaler(amqp.DefaultMarshaler{})
		for name, pair := range map[string][2]amqp.Marshaler{
			"ours to ours": {ours, ours}, "ours to default": {ours, theirs}, "default to ours": {theirs, ours},
		} {
			publishing, err := pair[0].Marshal(msg)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			got := unmarshal(t, pair[1], deliver(publishing))
			wanted := want
			if brokersOwn(key) && (strings.HasPrefix(name, "ours ") || key == inboxamqp.RedeliveredKey) {
				wanted = maps.Clone(want)
				delete(wanted, key)
			}
			if got.UUID != id || string(got.Payload) != string(body) || !maps.Equal(got.Metadata, wanted) {
				t.Fatalf("%s: %q %q %q became %q %q %q", name, id, want, body, got.UUID, got.Metadata, got.Payload)
			}
		}
	})
}
