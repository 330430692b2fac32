package inboxtest

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	inbox "github.com/devmappa/watermill-inbox"
)

// The router publishes after the commit. A publish that fails would lose the messages, so the commit stores them.
var producedCases = []kitCase{
	{"a publish that fails after the commit is made up for by the redelivery", publishFailsAfterCommit},
	{"a publish that fails half-way is repeated as a whole", publishFailsHalfWay},
	{"a copy that arrives between the commit and the publish", copyBetweenCommitAndPublish},
	{"whatever the messages hold, a replay holds the same", replayHoldsTheSame},
	{"messages without a UUID get one that stays", messagesWithoutUUID},
	{"the incoming message passed through keeps its id", incomingMessagePassedThrough},
	{"a copy for a handler that has no publish topic any more is left with the broker", copyWithoutPublishTopic},
	{"many messages of one handler", manyMessagesOfOneHandler},
	{"messages without a publish topic are refused before the commit", messagesWithoutPublishTopic},
	{"a nil message is refused before the commit", handlerReturnsNilMessage},
	{"messages that a newer version stored are refused, not lost", storedByNewerVersion},
	{"a rolled back attempt stores nothing", rolledBackAttemptStoresNothing},
	{"stored bytes come back as they are", storedBytesComeBack},
	{"an expired record is deleted, and its unsent messages are kept", expiredRecordLeavesUnsent},
}

func publishFailsAfterCommit(k *kit) {
	var runs atomic.Int32
	d := k.deliver(k.Repository, inbox.Options{}, true, func(msg *message.Message) ([]*message.Message, error) {
		runs.Add(1)
		event := message.NewMessageWithContext(msg.Context(), "event-of-"+msg.UUID, []byte("booked"))
		event.Metadata.Set("type", "Booked")
		return []*message.Message{event}, k.Write(msg.Context(), msg.UUID)
	})
	d.failPublish(2)
	key := k.key()
	d.want(nacked, key)
	d.want(nacked, key)
	d.want(acked, key)
	k.wantRuns(&runs, 1)
	k.wantEffects(key.MessageID)
	published := d.allPublished()
	if len(published) != 1 {
		k.Fatalf("%d messages were published, want 1", len(published))
	}
	got := published[0]
	if got.UUID != "event-of-"+key.MessageID || got.Metadata.Get("type") != "Booked" || string(got.Payload) != "booked" {
		k.Fatalf("replayed %s %v %q", got.UUID, got.Metadata, got.Payload)
	}
}

func publishFailsHalfWay(k *kit) {
	d := k.deliver(k.Repository, inbox.Options{}, true, func(*message.Message) ([]*message.Message, error) {
		return []*message.Message{message.NewMessage("1", nil), message.NewMessage("", nil)}, nil
	})
	d.failPublish(1) // the broker may have taken the first of them
	key := k.key()
	d.want(nacked, key)
	d.want(acked, key)
	attempts := d.allAttempts()
	if len(attempts) != 2 || !slices.Equal(message.Messages(attempts[0]).IDs(), message.Messages(attempts[1]).IDs()) {
		k.Fatalf("attempts %v, want two with the same UUIDs", attempts)
	}
}

func copyBetweenCommitAndPublish(k *kit) {
	var runs atomic.Int32
	committed, leave := make(chan struct{}), make(chan struct{})
	m := k.newMiddleware(k.Repository)
	d := k.newDeliveries(m)
	var held atomic.Bool
	d.startRouter(true, k.produce(&runs), func(next message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			produced, err := next(msg)
			if held.CompareAndSwap(false, true) {
				close(committed)
				<-leave
			}
			return produced, err
		}
	}, m.Middleware)
	key := k.key()
	first := d.start(key, k.context())
	<-committed
	d.want(acked, key) // it cannot know whether the first will publish
	close(leave)
	if got := d.wait(first); got != acked {
		k.Fatalf("the first was %s", got)
	}
	if got := message.Messages(d.allPublished()).IDs(); len(got) != 2 || got[0] != got[1] {
		k.Fatalf("published %q, want the same UUID twice", got)
	}
	k.wantRuns(&runs, 1)
}

func replayHoldsTheSame(k *kit) {
	binary := string([]byte{0, 1, 0xff, 0xfe, '"', '\\', '\'', 0xed, 0xa0, 0x80})
	produce := func() []*message.Message {
		var messages []*message.Message
		for i, payload := range [][]byte{nil, {}, {0}, []byte(binary), bytes.Repeat([]byte(binary), 100_000)} {
			msg := message.NewMessage(fmt.Sprintf("%s-%d", binary, i), payload)
			msg.Metadata.Set(binary, binary)
			msg.Metadata.Set("", "")
			msg.Metadata.Set("text", "日本語 '; --")
			messages = append(messages, msg)
		}
		return append(messages, message.NewMessage("no metadata", nil))
	}
	d := k.deliver(k.Repository, inbox.Options{}, true, func(*message.Message) ([]*message.Message, error) {
		return produce(), nil
	})
	d.failPublish(1)
	key := k.key()
	d.want(nacked, key)
	d.want(acked, key)
	published, want := d.allPublished(), produce()
	if len(published) != len(want) {
		k.Fatalf("%d messages were published, want %d", len(published), len(want))
	}
	for i := range want {
		if !published[i].Equals(want[i]) {
			k.Fatalf("message %d differs: %q, want %q", i, published[i].UUID, want[i].UUID)
		}
	}
}

func messagesWithoutUUID(k *kit) {
	d := k.deliver(k.Repository, inbox.Options{}, true, func(*message.Message) ([]*message.Message, error) {
		return []*message.Message{message.NewMessage("", nil), message.NewMessage("", nil), message.NewMessage("own", nil)}, nil
	})
	d.failPublish(1)
	key := k.key()
	d.want(nacked, key)
	d.want(acked, key)
	d.want(acked, k.key())
	attempts := d.allAttempts()
	if len(attempts) != 3 {
		k.Fatalf("%d attempts to publish, want 3", len(attempts))
	}
	first, copied, other := attempts[0], attempts[1], attempts[2]
	for i := range first {
		if first[i].UUID == "" || first[i].UUID != copied[i].UUID {
			k.Fatalf("UUID %q became %q", first[i].UUID, copied[i].UUID)
		}
	}
	if first[0].UUID == first[1].UUID || first[0].UUID == other[0].UUID || first[2].UUID != "own" {
		k.Fatal("UUIDs are not the messages' own")
	}
}

func incomingMessagePassedThrough(k *kit) {
	var incoming *message.Message
	d := k.deliver(k.Repository, inbox.Options{MessageID: inbox.FirstMessageID(inbox.MessageUUID, inbox.MessageIDFromMetadata("order"))}, true,
		func(msg *message.Message) ([]*message.Message, error) {
			incoming = msg
			return []*message.Message{msg}, nil
		})
	msg := message.NewMessage("", []byte("payload"))
	msg.Metadata.Set("order", k.key().MessageID)
	d.messages <- msg
	if got := d.wait(msg); got != acked {
		k.Fatalf("the message was %s: %v", got, d.allErrors())
	}
	if incoming.UUID != "" {
		k.Fatalf("the incoming message was given the UUID %q, which changes its key", incoming.UUID)
	}
	if published := d.allPublished(); len(published) != 1 || published[0].UUID == "" || string(published[0].Payload) != "payload" {
		k.Fatalf("published %v", published)
	}
}

func copyWithoutPublishTopic(k *kit) {
	before := k.deliver(k.Repository, inbox.Options{}, true, k.produce(new(atomic.Int32)))
	before.failPublish(1)
	key := k.key()
	before.want(nacked, key)
	after := k.deliver(k.Repository, inbox.Options{}, false, func(*message.Message) ([]*message.Message, error) {
		return nil, errors.New("must not run")
	})
	after.want(nacked, key)
	if err := after.lastError(); !errors.Is(err, inbox.ErrStoredMessages) || inbox.ShouldPoison(err) {
		k.Fatalf("the error is %v, want a transient one that matches ErrStoredMessages", err)
	}
}

func manyMessagesOfOneHandler(k *kit) {
	const count = 10_000
	d := k.deliver(k.Repository, inbox.Options{}, true, func(*message.Message) ([]*message.Message, error) {
		messages := make([]*message.Message, count)
		for i := range messages {
			messages[i] = message.NewMessage(fmt.Sprint(i), []byte("payload"))
		}
		return messages, nil
	})
	d.failPublish(1)
	key := k.key()
	d.want(nacked, key)
	d.want(acked, key)
	got := d.allPublished()
	if len(got) != count || got[0].UUID != "0" || got[count-1].UUID != fmt.Sprint(count-1) {
		k.Fatalf("%d messages were published, want %d in order", len(got), count)
	}
}

func messagesWithoutPublishTopic(k *kit) {
	m, err := inbox.NewMiddleware(k.Repository, inbox.Options{Consumer: func(string) string { return consumer }})
	if err != nil {
		k.Fatal(err)
	}
	key := k.key()
	_, err = m.Middleware(func(msg *message.Message) ([]*message.Message, error) {
		return []*message.Message{message.NewMessage("event", nil)}, k.Write(msg.Context(), msg.UUID)
	})(message.NewMessage(key.MessageID, nil))
	if !errors.Is(err, inbox.ErrNoPublishTopic) || !inbox.ShouldPoison(err) {
		k.Fatalf("the error is %v, want a permanent one that matches ErrNoPublishTopic", err)
	}
	k.wantEffects()
	k.process(key, "effect")
}

func handlerReturnsNilMessage(k *kit) {
	d := k.deliver(k.Repository, inbox.Options{}, true, func(msg *message.Message) ([]*message.Message, error) {
		return []*message.Message{nil}, k.Write(msg.Context(), msg.UUID)
	})
	d.want(nacked, k.key())
	if err := d.lastError(); !inbox.ShouldPoison(err) {
		k.Fatalf("the error is %v, want a permanent one", err)
	}
	k.wantEffects()
}

func storedByNewerVersion(k *kit) {
	key := inbox.Key{Consumer: consumer, MessageID: k.key().MessageID}
	transaction := k.claim(k.context(), key)
	if _, err := transaction.Store(k.context(), inbox.StoreParams{Topic: "events", Produced: []byte("\x02frames")}); err != nil {
		k.Fatal(err)
	}
	if err := transaction.Commit(k.context()); err != nil {
		k.Fatal(err)
	}
	d := k.deliver(k.Repository, inbox.Options{}, true, func(*message.Message) ([]*message.Message, error) {
		return nil, errors.New("must not run")
	})
	d.want(nacked, key)
	if err := d.lastError(); !errors.Is(err, inbox.ErrStoredMessages) || inbox.ShouldPoison(err) {
		k.Fatalf("the error is %v, want a transient one that matches ErrStoredMessages", err)
	}
}

func rolledBackAttemptStoresNothing(k *kit) {
	key := k.key()
	transaction := k.claim(k.context(), key)
	if _, err := transaction.Store(k.context(), inbox.StoreParams{Topic: "events", Produced: []byte("lost")}); err != nil {
		k.Fatal(err)
	}
	if err := transaction.Rollback(); err != nil {
		k.Fatal(err)
	}
	k.process(key, "effect")
	if record := k.wantProcessed(key); record.Produced != nil {
		k.Fatalf("the record has %q", record.Produced)
	}
}

func storedBytesComeBack(k *kit) {
	all := make([]byte, 256)
	for i := range all {
		all[i] = byte(i)
	}
	for _, stored := range [][]byte{{0}, all, bytes.Repeat(all, 40_960)} {
		key := k.key()
		transaction := k.claim(k.context(), key)
		if _, err := transaction.Store(k.context(), inbox.StoreParams{Topic: "日本語 '", Produced: stored}); err != nil {
			k.Fatal(err)
		}
		if err := transaction.Commit(k.context()); err != nil {
			k.Fatal(err)
		}
		if got := k.wantProcessed(key); got.Produced == nil || !bytes.Equal(got.Produced, stored) || got.Topic != "日本語 '" {
			k.Fatalf("stored %d bytes, got %d for %q, nil %v", len(stored), len(got.Produced), got.Topic, got.Produced == nil)
		}
	}
}

func expiredRecordLeavesUnsent(k *kit) {
	key := k.key()
	transaction := k.claim(k.context(), key)
	if _, err := transaction.Store(k.context(), inbox.StoreParams{Topic: "events", Produced: []byte("unsent")}); err != nil {
		k.Fatal(err)
	}
	if err := transaction.Commit(k.context()); err != nil {
		k.Fatal(err)
	}
	if err := k.Age(k.context(), key, 2*time.Hour); err != nil {
		k.Fatal(err)
	}
	k.wantPass(time.Hour, inbox.CleanerPass{Deleted: 1, Unsent: 1})
	found, err := k.records().FindRecords(k.context(), inbox.Selection{Unsent: true}, inbox.Record{}, 2)
	if err != nil || len(found) != 1 || found[0].Key != key || string(found[0].Produced) != "unsent" || found[0].Topic != "events" {
		k.Fatalf("found %+v, %v", found, err)
	}
	// A copy runs again, as the retention says, and what it stores is kept as well.
	k.processUnsent(key)
	if count, err := k.records().CountRecords(k.context(), inbox.Selection{Unsent: true}); count != 2 || err != nil {
		k.Fatalf("%d are unsent, %v", count, err)
	}
}
