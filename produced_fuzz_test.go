package inbox

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
)

// FuzzEncodeProduced: what a handler returns is what is sent again, byte for byte, and an older version of this
// module refuses what a newer one has stored.
func FuzzEncodeProduced(f *testing.F) {
	f.Add("events", "event-1", "key", "value", []byte(`{"id":1}`), 2)
	f.Add("events", "", "", "", []byte(nil), 0)
	f.Add("e", "a\x00b", "\xff\xfe", "\xed\xa0\x80", []byte{}, -1)
	f.Add("日本語", "\xff", "\"</script>\u2028", "\\u0000", []byte{0xff, 0}, 10)
	f.Add("\xff", strings.Repeat("x", 300), strings.Repeat("k", 300), strings.Repeat("v", 300), bytes.Repeat([]byte{0}, 300), 1)
	f.Add("events", "same", "same", "same", []byte("same"), 1<<40)

	f.Fuzz(func(t *testing.T, topic, uuid, field, value string, payload []byte, version int) {
		if topic == "" {
			return // refused before anything is stored
		}
		first := message.NewMessage(uuid, payload)
		for i, metadata := range []string{field, value, uuid, topic} {
			first.Metadata.Set(metadata, fmt.Sprint(i)+value)
		}
		second := message.NewMessage(value, nil)
		second.Metadata = nil
		third := message.NewMessage(uuid, []byte{})
		third.Metadata.Set(field, value)
		sent := nameProduced(Key{Consumer: topic, MessageID: uuid}, []*message.Message{first, second, third})
		if first.UUID != uuid || second.UUID != value {
			t.Fatal("naming has changed the handler's own messages")
		}

		encoded, err := encodeProduced(topic, sent)
		if err != nil {
			t.Fatal(err)
		}
		if again, err := encodeProduced(topic, sent); err != nil || !bytes.Equal(encoded, again) {
			t.Fatalf("encoded as %s and as %s, %v", encoded, again, err)
		}
		wantSame(t, encoded, topic, sent)

		other := bytes.Replace(encoded, []byte(`"version":1,`), fmt.Appendf(nil, `"version":%d,`, version), 1)
		if _, _, err := decodeProduced(other); version != producedVersion && !errors.Is(err, ErrStoredMessages) {
			t.Fatalf("version %d was read: %v", version, err)
		}
		// Added fields keep the version.
		added := bytes.Replace(encoded, []byte(`"version":1,`), []byte(`"version":1,"added":{"a":[1]},`), 1)
		wantSame(t, added, topic, sent)
	})
}

// FuzzDecodeProduced: whatever a record holds is refused, or is messages that can be sent, and stored again.
func FuzzDecodeProduced(f *testing.F) {
	const golden = `{"version":1,"topic":"ZXZlbnRz","messages":[{"uuid":"ZQ==","metadata":[["YQ==","Yg=="],["Yg==","/w=="]],"payload":"eA=="}]}`
	f.Add([]byte(golden))
	for at := range len(golden) {
		f.Add([]byte(golden[:at]))
	}
	for _, change := range [][2]string{
		{`:1`, `:2`}, {`:1`, `:1.0`}, {`:1`, `:"1"`}, {`:1`, `:1e0`}, {`:1`, `:null`}, {`:1,`, `:1,"VERSION":2,`},
		{`ZXZlbnRz`, ``}, {`ZXZlbnRz`, `ZXZlbnR`}, {`"ZXZlbnRz"`, `null`}, {`ZQ==`, ``}, {`"ZQ=="`, `5`},
		{`["YQ==","Yg=="]`, `["YQ=="]`}, {`["YQ==","Yg=="]`, `["YQ==","Yg==","Yw=="]`}, {`["YQ==","Yg=="]`, `null`}, {`"Yg=="],["Yg=="`, `"Yg=="],["YQ=="`},
		{`"eA=="`, `null`}, {`"eA=="`, `[120]`}, {`"eA=="`, `"e\nA=="`}, {`}]}`, `},null]}`}, {`}]}`, `}]}}`}, {`}]}`, `}]} x`},
	} {
		f.Add([]byte(strings.Replace(golden, change[0], change[1], 1)))
	}
	f.Add([]byte(`{"version":1,"topic":"ZQ==","messages":[]}`))
	f.Add([]byte(`null`))
	f.Add([]byte(strings.Repeat(`[`, 20_000)))
	for _, part := range []string{`[{"uuid":"ZQ==","payload":"eA=="}]`, `[{"uuid":"ZQ==","UUID":""}]`, `[null]`, `[["YQ==","Yg=="]]`,
		`[["YQ=="],["YQ==","Yg==","Yw=="],null]`, `[],"version":2`, `null}],"Messages":[{"uuid":"ZQ=="`} {
		f.Add([]byte(part))
	}

	f.Fuzz(func(t *testing.T, part []byte) {
		// As the whole record, and inside of one that is good, which chance alone seldom makes.
		for _, record := range []string{"%s", `{"version":1,"topic":"dA==","messages":%s}`, `{"version":1,"topic":"dA==","messages":[{"uuid":"ZQ==","metadata":%s}]}`} {
			wantRefusedOrSendable(t, []byte(strings.Replace(record, "%s", string(part), 1)))
		}
	})
}

func wantRefusedOrSendable(t *testing.T, encoded []byte) {
	t.Helper()
	topic, messages, err := decodeProduced(encoded)
	if err != nil {
		if !errors.Is(err, ErrStoredMessages) || topic != "" || messages != nil {
			t.Fatalf("%q, %d messages, %v", topic, len(messages), err)
		}
		return
	}
	var head struct{ Version float64 }
	if err := json.Unmarshal(encoded, &head); err != nil || head.Version != producedVersion {
		t.Fatalf("version %v was read, %v", head.Version, err)
	}
	// Nothing is stored without these, so a record without them is damaged, and must not pass for sent.
	if topic == "" || len(messages) == 0 {
		t.Fatalf("read a topic %q and %d messages", topic, len(messages))
	}
	for _, msg := range messages {
		if msg.UUID == "" {
			t.Fatal("read a message without a UUID")
		}
	}
	again, err := encodeProduced(topic, messages)
	if err != nil {
		t.Fatal(err)
	}
	wantSame(t, again, topic, messages)
}

// wantSame fails the test unless the encoded messages are these.
func wantSame(t *testing.T, encoded []byte, topic string, messages []*message.Message) {
	t.Helper()
	gotTopic, got, err := decodeProduced(encoded)
	if err != nil || gotTopic != topic || len(got) != len(messages) {
		t.Fatalf("%q and %d messages became %q and %d: %v", topic, len(messages), gotTopic, len(got), err)
	}
	for i, msg := range messages {
		if !got[i].Equals(msg) {
			t.Fatalf("message %q %q %q became %q %q %q", msg.UUID, msg.Metadata, msg.Payload, got[i].UUID, got[i].Metadata, got[i].Payload)
		}
	}
}
