package inbox

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
)

// store keeps the produced messages in the claim's transaction: the router publishes them only after
// the commit, and a publish that fails must find them again. It returns what the router is to publish,
// which is nothing when there is an outbox, and the step for an error.
func (a *attempt) store(ctx context.Context, transaction Transaction, produced []*message.Message) (string, []*message.Message, error) {
	if len(produced) == 0 {
		return "", nil, nil
	}
	const step = "store"
	topic := message.PublishTopicFromCtx(a.outer)
	if topic == "" {
		return step, nil, ErrNoPublishTopic
	}
	if slices.Contains(produced, nil) {
		return step, nil, Permanent(errors.New("the handler returned a nil message"))
	}
	produced = nameProduced(a.inner.key, produced)
	if a.options.Outbox != nil {
		return "outbox", nil, a.options.Outbox.Publish(topic, a.inside(produced)...)
	}
	if !utf8.ValidString(topic) || strings.IndexByte(topic, 0) >= 0 {
		return step, nil, Permanent(fmt.Errorf("the publish topic %q is not valid UTF-8 without NUL", topic))
	}
	var err error
	a.processedAt, err = transaction.Store(ctx, StoreParams{Topic: topic, Produced: encodeProduced(produced)})
	return step, produced, err
}

// inside returns copies with the handler's context: one of the messages may be the incoming one.
func (a *attempt) inside(produced []*message.Message) []*message.Message {
	copies := make([]*message.Message, len(produced))
	for i, msg := range produced {
		copies[i] = msg.Copy()
		copies[i].SetContext(&a.inner)
	}
	return copies
}

// duplicate returns what the router is to publish again of a message that was processed before.
func (a *attempt) duplicate(record *Record) ([]*message.Message, error) {
	produced, err := a.replay(record)
	if err != nil {
		return nil, a.failed("replay", err)
	}
	a.observation.Outcome, a.observation.Age = Duplicate, max(0, time.Since(record.ProcessedAt))
	if len(produced) > 0 {
		a.observation.Outcome = Replayed
		a.expect(record.ProcessedAt, produced)
	}
	return produced, nil
}

// replay returns the stored messages of a message that was processed before. They are published again
// until they are known to be sent: the router publishes after the commit, so they may never have been.
func (a *attempt) replay(record *Record) ([]*message.Message, error) {
	if record.Produced == nil {
		return nil, nil
	}
	produced, err := decodeProduced(record.Produced)
	if err != nil {
		return nil, err
	}
	now := message.PublishTopicFromCtx(a.outer)
	if now == "" {
		return nil, fmt.Errorf("%w: the handler has no publish topic, they are for %q", ErrStoredMessages, record.Topic)
	}
	if now != record.Topic {
		a.options.Logger.Error("Stored messages are published to another topic than they were stored for", nil,
			a.fields().Add(watermill.LogFields{"stored_topic": record.Topic, "topic": now}))
	}
	return produced, nil
}

// producedVersion is the version of the stored form that this module writes, its first byte. It rises only when an older
// reader would send something wrong, and then the older reader refuses. What is added keeps the version: it stands at
// the end of a message, where older readers do not look.
const producedVersion = 1

// producedNamespace makes the UUIDs of messages that were produced without one. It must never change: a
// replay by a newer version has to arrive at the same UUID.
var producedNamespace = uuid.MustParse("1f2b3c0e-5d0a-4c55-9d57-6f1f6c0d7a31")

// nameProduced gives messages without a UUID a stable one, so that a consumer downstream can tell copies. Such
// a message is copied: it may be the incoming one, whose UUID may be part of its key.
func nameProduced(key Key, messages []*message.Message) []*message.Message {
	named := slices.Clone(messages)
	for i, msg := range messages {
		if msg.UUID == "" {
			// Lengths keep ("a", "bc") and ("ab", "c") apart.
			name := binary.AppendUvarint(nil, uint64(len(key.Consumer)))
			name = append(name, key.Consumer...)
			name = append(name, key.MessageID...)
			name = binary.AppendUvarint(name, uint64(i))
			named[i] = msg.CopyWithContext()
			named[i].UUID = uuid.NewSHA1(producedNamespace, name).String()
		}
	}
	return named
}

// encodeProduced makes the stored form in one piece, because payloads may be large: the version, and each message with its
// length before it. A message is its UUID, the number of its metadata fields, these, and its payload, each with its length
// before it. Lengths and numbers are unsigned varints.
func encodeProduced(messages []*message.Message) []byte {
	size := 1
	for _, msg := range messages {
		size += binary.MaxVarintLen64 + encodedSize(msg)
	}
	encoded := append(make([]byte, 0, size), producedVersion)
	for _, msg := range messages {
		encoded = binary.AppendUvarint(encoded, uint64(encodedSize(msg)))
		encoded = appendText(encoded, msg.UUID)
		encoded = binary.AppendUvarint(encoded, uint64(len(msg.Metadata)))
		for _, field := range slices.Sorted(maps.Keys(msg.Metadata)) {
			encoded = appendText(appendText(encoded, field), msg.Metadata[field])
		}
		encoded = appendText(encoded, msg.Payload)
	}
	return encoded
}

func encodedSize(msg *message.Message) int {
	size := textSize(len(msg.UUID)) + varintSize(len(msg.Metadata)) + textSize(len(msg.Payload))
	for field, value := range msg.Metadata {
		size += textSize(len(field)) + textSize(len(value))
	}
	return size
}

func textSize(length int) int { return varintSize(length) + length }

func varintSize(n int) int {
	return len(binary.AppendUvarint(make([]byte, 0, binary.MaxVarintLen64), uint64(n)))
}

func appendText[T ~string | ~[]byte](encoded []byte, text T) []byte {
	return append(binary.AppendUvarint(encoded, uint64(len(text))), text...)
}

// decodeProduced returns messages whose payloads are parts of the stored form.
func decodeProduced(encoded []byte) (messages []*message.Message, err error) {
	if len(encoded) == 0 || encoded[0] != producedVersion {
		return nil, fmt.Errorf("%w: they have another version than %d, which this module reads", ErrStoredMessages, producedVersion)
	}
	for r := (storedReader{rest: encoded[1:]}); len(r.rest) > 0; {
		one := storedReader{rest: r.text()}
		msg := message.NewMessage(string(one.text()), nil)
		for n := one.number(); n > 0 && !one.broken; n-- {
			field := string(one.text())
			msg.Metadata[field] = string(one.text())
		}
		msg.Payload = one.text()
		// Nothing is stored without a UUID.
		if r.broken || one.broken || msg.UUID == "" {
			return nil, fmt.Errorf("%w: they are damaged", ErrStoredMessages)
		}
		messages = append(messages, msg)
	}
	if len(messages) == 0 { // a damaged record would pass for one that is sent
		return nil, fmt.Errorf("%w: they are damaged", ErrStoredMessages)
	}
	return messages, nil
}

// storedReader reads a stored form, and nothing once that is broken.
type storedReader struct {
	rest   []byte
	broken bool
}

func (r *storedReader) number() uint64 {
	n, size := binary.Uvarint(r.rest)
	if size <= 0 {
		r.rest, r.broken = nil, true
		return 0
	}
	r.rest = r.rest[size:]
	return n
}

func (r *storedReader) text() []byte {
	n := r.number()
	if n > uint64(len(r.rest)) {
		r.rest, r.broken = nil, true
		return nil
	}
	text := r.rest[:n:n]
	r.rest = r.rest[n:]
	return text
}
