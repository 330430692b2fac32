package inboxtest

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"

	inbox "github.com/devmappa/watermill-inbox"
)

// Stored messages are sent again until they are known to be sent, and not after.
var markingCases = []kitCase{
	{"what was acknowledged is marked, and not sent again", acknowledgedIsMarked},
	{"what was acknowledged is marked, also when the attempt's context has ended by then", acknowledgedIsMarkedAfterTimeout},
	{"what was nacked is not marked, until a replay is acknowledged", nackedIsNotMarked},
	{"an acknowledgement before the publish proves nothing", acknowledgedBeforePublish},
	{"a context that ends before the publish marks nothing", contextEndsBeforePublish},
	{"marks are batched, and tried again when they fail", marksAreBatchedAndRetried},
	{"Close does not wait longer than it is told to", closeWaitsNoLongerThanTold},
	{"after Close the middleware works, and marks nothing", closedMarksNothing},
	{"unsent messages are listed in pages, and published again", unsentIsListedAndPublished},
	{"an unsent record that cannot be read does not hide the others", unreadableUnsentRecord},
	{"marking passes over records that have nothing to mark", nothingToMark},
	{"a mark is for the record that was claimed then, not for a later one of the key", lateMarkOfEarlierRecord},
	{"many processes mark the same records at once", manyProcessesMarkAtOnce},
}

func acknowledgedIsMarked(k *kit) {
	var runs atomic.Int32
	d := k.deliver(k.Repository, inbox.Options{}, true, k.produce(&runs))
	key := inbox.Key{Consumer: consumer, MessageID: k.key().MessageID}
	d.want(acked, key)
	d.flush()
	if record := k.wantProcessed(key); record.Produced != nil {
		k.Fatalf("the record still has %q", record.Produced)
	}
	d.want(acked, key)
	if got := len(d.allAttempts()); got != 1 {
		k.Fatalf("%d publishes, want 1", got)
	}
	k.wantRuns(&runs, 1)
	// It is no longer unsent, so it expires.
	if err := k.Age(k.context(), key, 2*time.Hour); err != nil {
		k.Fatal(err)
	}
	k.wantPass(time.Hour, inbox.CleanerPass{Deleted: 1})
}

func acknowledgedIsMarkedAfterTimeout(k *kit) {
	// Watermill's Timeout ends it before the router publishes.
	d := k.newDeliveries(k.newMiddleware(k.Repository))
	d.startRouter(true, k.produce(new(atomic.Int32)), func(next message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			defer msg.SetContext(msg.Context()) // Timeout does not
			produced, err := middleware.Timeout(patience)(next)(msg)
			time.Sleep(10 * time.Millisecond) // there is no signal that somebody has seen the end of the context
			return produced, err
		}
	}, d.middleware.Middleware)
	key := inbox.Key{Consumer: consumer, MessageID: k.key().MessageID}
	d.failPublish(1)
	for _, want := range []result{nacked, acked} { // processed, and replayed
		d.want(want, key)
	}
	processed := inbox.Key{Consumer: consumer, MessageID: k.key().MessageID}
	d.want(acked, processed)
	d.flush()
	for _, key := range []inbox.Key{key, processed} {
		if record := k.wantProcessed(key); record.Produced != nil {
			k.Fatalf("the record still has %q", record.Produced)
		}
	}
}

func nackedIsNotMarked(k *kit) {
	var runs atomic.Int32
	d := k.deliver(k.Repository, inbox.Options{}, true, k.produce(&runs))
	d.failPublish(2)
	key := inbox.Key{Consumer: consumer, MessageID: k.key().MessageID}
	d.want(nacked, key)
	d.want(nacked, key)
	if record := k.wantProcessed(key); record.Produced == nil {
		k.Fatal("the record was marked as sent although it was not")
	}
	d.want(acked, key)
	d.flush()
	if record := k.wantProcessed(key); record.Produced != nil {
		k.Fatalf("the record still has %q after the replay was acknowledged", record.Produced)
	}
	k.wantRuns(&runs, 1)
}

func acknowledgedBeforePublish(k *kit) {
	// Watermill's InstantAck does that.
	key := inbox.Key{Consumer: consumer, MessageID: k.key().MessageID}
	d := k.deliver(k.Repository, inbox.Options{}, true, func(msg *message.Message) ([]*message.Message, error) {
		msg.Ack()
		return []*message.Message{message.NewMessage("event", nil)}, nil
	})
	d.publishes = make(chan struct{}, 1)
	d.failPublish(1)
	d.want(acked, key)
	<-d.publishes // after the commit
	d.flush()
	if record := k.wantProcessed(key); record.Produced == nil {
		k.Fatal("the record was marked as sent although it was not")
	}
}

func contextEndsBeforePublish(k *kit) {
	key := inbox.Key{Consumer: consumer, MessageID: k.key().MessageID}
	ctx, cancel := context.WithCancel(k.context())
	m := k.newMiddleware(k.Repository)
	entered := make(chan struct{})
	d := k.newDeliveries(m)
	d.startRouter(true, func(msg *message.Message) ([]*message.Message, error) {
		return []*message.Message{message.NewMessage("event", nil)}, nil
	}, func(next message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			_, err := next(msg)
			close(entered)
			<-ctx.Done()
			return nil, errors.Join(err, ctx.Err()) // not published
		}
	}, m.Middleware)
	msg := d.start(key, ctx)
	<-entered
	cancel()
	if got := d.wait(msg); got != nacked {
		k.Fatalf("the message was %s", got)
	}
	d.flush()
	if record := k.wantProcessed(key); record.Produced == nil {
		k.Fatal("the record was marked as sent although it was not")
	}
}

func marksAreBatchedAndRetried(k *kit) {
	const messages = 250
	flaky := &failingMarks{Repository: k.Repository, fails: 2}
	var failed, marked atomic.Int32
	observe := func(ctx context.Context, o inbox.MarksObservation) {
		switch {
		case ctx.Err() != nil || o.Dropped != 0 || (o.Records == 0) != (o.Err != nil):
			k.Errorf("observed %+v", o)
		case o.Err != nil:
			failed.Add(1)
		default:
			marked.Add(int32(o.Records))
		}
	}
	d := k.deliver(flaky, inbox.Options{ObserveMarks: observe}, true, k.produce(new(atomic.Int32)))
	var keys []inbox.Key
	for range messages {
		key := inbox.Key{Consumer: consumer, MessageID: k.key().MessageID}
		keys = append(keys, key)
		d.want(acked, key)
	}
	d.flush()
	for _, key := range keys {
		if record := k.wantProcessed(key); record.Produced != nil {
			k.Fatalf("record %s was not marked", key)
		}
	}
	if failed.Load() != 2 || marked.Load() != messages {
		k.Fatalf("%d tries were observed to fail and %d marks to succeed, want 2 and %d", failed.Load(), marked.Load(), messages)
	}
	if got := flaky.calls(); got > 100 {
		k.Fatalf("%d statements for %d marks", got, messages)
	}
}

func closeWaitsNoLongerThanTold(k *kit) {
	m := k.newMiddleware(k.Repository)
	d := k.newDeliveries(m)
	unpublished, leave := make(chan struct{}), make(chan struct{})
	d.startRouter(true, k.produce(new(atomic.Int32)), func(next message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			produced, err := next(msg)
			close(unpublished)
			<-leave
			return produced, err
		}
	}, m.Middleware)
	msg := d.start(k.key(), k.context())
	<-unpublished
	ctx, cancel := context.WithTimeout(k.context(), 50*time.Millisecond)
	defer cancel()
	if err := m.Close(ctx); !errors.Is(err, context.DeadlineExceeded) {
		k.Errorf("Close returned %v", err)
	}
	close(leave)
	if got := d.wait(msg); got != acked {
		k.Fatalf("the message was %s", got)
	}
}

func closedMarksNothing(k *kit) {
	marked := make(chan inbox.MarksObservation, 1)
	m := k.newMiddlewareWith(k.Repository, inbox.Options{ObserveMarks: func(_ context.Context, o inbox.MarksObservation) { marked <- o }})
	if err := m.Close(k.context()); err != nil {
		k.Fatal(err)
	}
	d := k.newDeliveries(m)
	d.startRouter(true, k.produce(new(atomic.Int32)), m.Middleware)
	key := k.key()
	if got := d.wait(d.start(key, k.context())); got != acked {
		k.Fatalf("the message was %s", got)
	}
	select {
	case o := <-marked:
		k.Fatalf("observed %+v", o)
	case <-time.After(200 * time.Millisecond): // nothing tells that nothing happens
	}
	if record := k.wantProcessed(key); record.Produced == nil {
		k.Fatal("the record was marked")
	}
}

func unsentIsListedAndPublished(k *kit) {
	k.records()
	d := k.deliver(k.Repository, inbox.Options{}, true, k.produce(new(atomic.Int32)))
	for _, id := range []string{"a", "B", "b", "é", "z'"} {
		key := inbox.Key{Consumer: consumer, MessageID: id}
		d.failPublish(1)
		d.want(nacked, key)
		if id == "z'" {
			continue // too young
		}
		if err := k.Age(k.context(), key, 2*time.Hour); err != nil {
			k.Fatal(err)
		}
	}
	sent := k.key()
	k.process(sent, "effect")
	var listed []inbox.Unsent
	for after := (inbox.Record{}); ; {
		page, err := inbox.ListUnsent(k.context(), k.records(), time.Hour, after, 3)
		if err != nil {
			k.Fatal(err)
		}
		listed = append(listed, page...)
		if len(page) < 3 {
			break
		}
		after = page[len(page)-1].Record
	}
	var ids []string
	for _, unsent := range listed {
		ids = append(ids, unsent.Key.MessageID)
		if unsent.Err != nil || unsent.Topic != publishTopic || len(unsent.Messages) != 1 || unsent.Messages[0].UUID != "event-of-"+unsent.Key.MessageID {
			k.Fatalf("listed %+v", unsent)
		}
	}
	if want := []string{"B", "a", "b", "é"}; !slices.Equal(ids, want) {
		k.Fatalf("listed %q, want %q", ids, want)
	}
	d.failPublish(1)
	if err := listed[0].Publish(k.context(), k.Repository, d); err == nil {
		k.Fatal("a failed publish was reported as done")
	}
	if k.wantProcessed(listed[0].Key).Produced == nil {
		k.Fatal("a failed publish was marked as sent")
	}
	for _, unsent := range listed {
		if err := unsent.Publish(k.context(), k.Repository, d); err != nil {
			k.Fatal(err)
		}
		if k.wantProcessed(unsent.Key).Produced != nil {
			k.Fatalf("%s was not marked as sent", unsent.Key)
		}
	}
	if got := message.Messages(d.allPublished()).IDs(); !slices.Equal(got, []string{"event-of-B", "event-of-a", "event-of-b", "event-of-é"}) {
		k.Fatalf("published %q", got)
	}
	if rest, err := inbox.ListUnsent(k.context(), k.records(), time.Hour, inbox.Record{}, 10); err != nil || len(rest) != 0 {
		k.Fatalf("still unsent: %v, %v", rest, err)
	}
}

func unreadableUnsentRecord(k *kit) {
	for id, stored := range map[string]string{"1": "\x02frames", "2": "\x01\x0a\x01x\x00\x01xlater"} {
		transaction := k.claim(k.context(), inbox.Key{Consumer: consumer, MessageID: id})
		if _, err := transaction.Store(k.context(), inbox.StoreParams{Topic: "events", Produced: []byte(stored)}); err != nil {
			k.Fatal(err)
		}
		if err := transaction.Commit(k.context()); err != nil {
			k.Fatal(err)
		}
	}
	list, err := inbox.ListUnsent(k.context(), k.records(), -time.Hour, inbox.Record{}, 10)
	if err != nil || len(list) != 2 {
		k.Fatalf("listed %v, %v", list, err)
	}
	if !errors.Is(list[0].Err, inbox.ErrStoredMessages) || list[0].Publish(k.context(), k.Repository, nil) == nil {
		k.Fatalf("the unreadable one is %+v", list[0])
	}
	if list[1].Err != nil || list[1].Topic != "events" || list[1].Messages[0].UUID != "x" {
		k.Fatalf("the readable one is %+v", list[1])
	}
}

func nothingToMark(k *kit) {
	key := k.key()
	k.process(key, "effect")
	plain := *k.wantProcessed(key)
	unknown := inbox.Record{Key: k.key(), ProcessedAt: time.Now()}
	for _, records := range [][]inbox.Record{nil, {plain}, {unknown}, {plain, unknown, plain}} {
		if locked, err := k.Repository.MarkSent(k.context(), records); err != nil || len(locked) != 0 {
			k.Fatalf("marking %v: %v are locked, %v", records, locked, err)
		}
	}
	k.wantProcessed(key)
	_ = k.claim(k.context(), unknown.Key).Rollback()
}

func lateMarkOfEarlierRecord(k *kit) {
	key := k.key()
	store := func() inbox.Record {
		transaction := k.claim(k.context(), key)
		processedAt, err := transaction.Store(k.context(), inbox.StoreParams{Topic: "events", Produced: []byte("stored")})
		if err != nil {
			k.Fatal(err)
		}
		if err := transaction.Commit(k.context()); err != nil {
			k.Fatal(err)
		}
		if record := k.wantProcessed(key); !record.ProcessedAt.Equal(processedAt) {
			k.Fatalf("stored at %s, but the record says %s", processedAt, record.ProcessedAt)
		}
		return inbox.Record{Key: key, ProcessedAt: processedAt}
	}
	first := store()
	if _, err := k.records().DeleteRecords(k.context(), []inbox.Record{first}); err != nil {
		k.Fatal(err)
	}
	time.Sleep(5 * time.Millisecond) // databases keep times to the millisecond
	second := store()
	k.markSent(first)
	if k.wantProcessed(key).Produced == nil {
		k.Fatal("a late mark of the first record has marked the second one, whose messages are lost")
	}
	k.markSent(first, second)
	if k.wantProcessed(key).Produced != nil {
		k.Fatal("the second record was not marked")
	}
}

func manyProcessesMarkAtOnce(k *kit) {
	var records []inbox.Record
	for range 50 {
		key := k.key()
		transaction := k.claim(k.context(), key)
		processedAt, err := transaction.Store(k.context(), inbox.StoreParams{Topic: "events", Produced: []byte("stored")})
		if err != nil {
			k.Fatal(err)
		}
		if err := transaction.Commit(k.context()); err != nil {
			k.Fatal(err)
		}
		records = append(records, inbox.Record{Key: key, ProcessedAt: processedAt})
	}
	var group sync.WaitGroup
	for i := range 4 {
		group.Add(1)
		go func() {
			defer group.Done()
			own := slices.Clone(records)
			if i%2 == 1 {
				slices.Reverse(own)
			}
			for len(own) > 0 { // the others pass over what one has locked
				locked, err := k.Repository.MarkSent(k.context(), own)
				if err != nil {
					k.Errorf("marking at once: %v", err)
				}
				own = locked
			}
		}()
	}
	group.Wait()
	for _, record := range records {
		if k.wantProcessed(record.Key).Produced != nil {
			k.Fatalf("record %s was not marked", record.Key)
		}
	}
}

// failingMarks fails its first marks.
type failingMarks struct {
	inbox.Repository
	mutex sync.Mutex
	fails int
	count int
}

func (f *failingMarks) MarkSent(ctx context.Context, records []inbox.Record) ([]inbox.Record, error) {
	f.mutex.Lock()
	f.count++
	fail := f.count <= f.fails
	f.mutex.Unlock()
	if fail {
		return nil, errors.New("the database is away")
	}
	return f.Repository.MarkSent(ctx, records)
}

func (f *failingMarks) calls() int {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	return f.count
}
