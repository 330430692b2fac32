package inboxtest

import (
	"errors"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	inbox "github.com/devmappa/watermill-inbox"
)

// The guard for messages that are older than the retention, and what the middleware reports to its observer.
var ageCases = []kitCase{
	{"a message that is too old runs, and that is said", tooOldRuns},
	{"a message that is too old can be refused", tooOldIsRefused},
	{"a message that is too old and has a record is a duplicate", tooOldWithRecord},
	{"the age is judged by the consumer's retention, where it is known", ageAgainstConsumerRetention},
	{"a time that cannot be true is not known, and that is counted", implausibleTimes},
	{"the observer is told what became of each attempt", observerSeesEachAttempt},
	{"the observer is told of a panic, and of the wait for a copy", observerSeesPanicAndWait},
}

func tooOldRuns(k *kit) {
	logger, watched := newCapture(), &observed{}
	var runs atomic.Int32
	d := k.deliver(k.Repository, inbox.Options{Logger: logger, Observe: watched.add, TooOld: oldAfter(time.Hour, 2*time.Hour)}, false, k.effect(&runs))
	key := k.key()
	d.want(acked, key)
	k.wantRuns(&runs, 1)
	if lines := logger.errors(); len(lines) != 1 {
		k.Errorf("error lines are %q, want one", lines)
	}
	if last := watched.last(); !last.TooOld || last.Outcome != inbox.Processed {
		k.Errorf("observed %+v", last)
	}
}

func tooOldIsRefused(k *kit) {
	watched := &observed{}
	guard := oldAfter(time.Hour, 2*time.Hour)
	guard.Refuse = true
	var runs atomic.Int32
	d := k.deliver(k.Repository, inbox.Options{Observe: watched.add, TooOld: guard}, false, k.effect(&runs))
	key := k.key()
	d.want(nacked, key)
	k.wantRuns(&runs, 0)
	if err := d.lastError(); !errors.Is(err, inbox.ErrTooOld) || !inbox.ShouldPoison(err) {
		k.Errorf("the error is %v, want a permanent one that matches ErrTooOld", err)
	}
	if last := watched.last(); !last.TooOld || last.Outcome != inbox.Failed {
		k.Errorf("observed %+v", last)
	}
	key.Consumer = consumer
	_ = k.claim(k.context(), key).Rollback()
}

func tooOldWithRecord(k *kit) {
	guard := oldAfter(time.Hour, 2*time.Hour)
	guard.Refuse = true
	var runs atomic.Int32
	d := k.deliver(k.Repository, inbox.Options{TooOld: guard}, false, k.effect(&runs))
	key := k.key()
	key.Consumer = consumer
	k.process(key, "effect")
	d.want(acked, key)
	k.wantRuns(&runs, 0)
}

func ageAgainstConsumerRetention(k *kit) {
	for name, c := range map[string]struct {
		guard inbox.TooOldOptions
		want  result
	}{
		"young":             {oldAfter(3*time.Hour, 2*time.Hour), acked},
		"from the future":   {oldAfter(time.Hour, -2*time.Hour), acked},
		"within the clocks": {oldAfter(time.Hour, 50*time.Minute), nacked},
		"before the margin": {oldAfter(time.Hour, 40*time.Minute), acked},
		"kept for ever":     {oldAfter(inbox.KeepForever, 2*time.Hour), acked},
		"own retention":     {withConsumer(oldAfter(time.Hour, 2*time.Hour), 3*time.Hour), acked},
		"own, too old":      {withConsumer(oldAfter(3*time.Hour, 2*time.Hour), time.Hour), nacked},
		"unknown": {inbox.TooOldOptions{Retention: inbox.Retention{Default: time.Nanosecond}, Time: func(*message.Message) (time.Time, bool) {
			return time.Time{}, false
		}}, acked},
		"an id that tells nothing": {inbox.TooOldOptions{Retention: inbox.Retention{Default: time.Nanosecond}}, acked},
	} {
		c.guard.Refuse = true
		d := k.deliver(k.Repository, inbox.Options{TooOld: c.guard}, false, k.effect(new(atomic.Int32)))
		if got := d.send(k.key(), k.context()); got != c.want {
			k.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}

func implausibleTimes(k *kit) {
	const month = 30 * 24 * time.Hour
	for name, c := range map[string]struct {
		id      string
		unknown bool
		want    result
	}{
		"a draft's UUIDv7, of the year 2191":   {"065e5a96-172c-771e-8000-bbac546447e1", true, acked},
		"a number of 26 digits":                {"00000000000000000000004711", true, acked},
		"a number that would be of 2023":       {"01700000000000000000000001", true, acked},
		"a UUIDv7 of a clock that was not set": {"00000000-0001-7000-8000-000000000000", true, acked},
		"a random UUID":                        {"6a5f0a54-8d3b-4a5e-9d4e-0f3c1a2b3c4d", true, acked},
		"a ULID of 2025":                       {"01JGFJJZ00ZZZZZZZZZZZZZZZZ", false, nacked},
		"a UUIDv7 of 2025":                     {"01941f29-7c00-7000-9000-000000000000", false, nacked},
		"a UUIDv7 of now":                      {inbox.UUIDv7.Bound(time.Now()), false, acked},
	} {
		watched := &observed{}
		guard := inbox.TooOldOptions{Retention: inbox.Retention{Default: month}, Refuse: true}
		d := k.deliver(k.Repository, inbox.Options{Observe: watched.add, TooOld: guard}, false, k.effect(new(atomic.Int32)))
		got := d.send(inbox.Key{Consumer: consumer, MessageID: c.id}, k.context())
		if last := watched.last(); got != c.want || last.AgeUnknown != c.unknown || last.TooOld != (c.want == nacked) {
			k.Errorf("%s: %s, want %s; observed %+v", name, got, c.want, last)
		}
	}
}

func observerSeesEachAttempt(k *kit) {
	watched := &observed{}
	fails := true
	d := k.deliver(k.Repository, inbox.Options{Observe: watched.add}, true, func(msg *message.Message) ([]*message.Message, error) {
		if fails {
			fails = false
			return nil, errors.New("handler failed")
		}
		return []*message.Message{message.NewMessage("event", nil)}, nil
	})
	key := k.key()
	key.Consumer = consumer
	d.want(nacked, key)
	if last := watched.last(); last.Outcome != inbox.Failed || last.Err == nil || last.Key != key || last.Wait <= 0 || last.Duration < last.Wait || last.Age != 0 {
		k.Errorf("observed %+v", last)
	}
	d.failPublish(1)
	d.want(nacked, key)
	if last := watched.last(); last.Outcome != inbox.Processed || last.Err != nil || last.Age != 0 {
		k.Errorf("observed %+v", last)
	}
	if err := k.Age(k.context(), key, time.Hour); err != nil {
		k.Fatal(err)
	}
	d.want(acked, key)
	if last := watched.last(); last.Outcome != inbox.Replayed || (last.Age-time.Hour).Abs() > time.Minute {
		k.Errorf("observed %+v", last)
	}
	d.flush()
	d.want(acked, key)
	if last := watched.last(); last.Outcome != inbox.Duplicate || (last.Age-time.Hour).Abs() > time.Minute {
		k.Errorf("observed %+v", last)
	}
	d.send(inbox.Key{Consumer: consumer}, k.context())
	if last := watched.last(); last.Outcome != inbox.Failed || last.Key.MessageID != "" || last.Wait != 0 {
		k.Errorf("observed %+v", last)
	}
}

func observerSeesPanicAndWait(k *kit) {
	watched := &observed{}
	entered, leave := make(chan struct{}), make(chan struct{})
	var runs atomic.Int32
	m, err := inbox.NewMiddleware(k.Repository, inbox.Options{Observe: watched.add, Consumer: func(string) string { return consumer }})
	if err != nil {
		k.Fatal(err)
	}
	key := k.key()
	handle := m.Middleware(func(*message.Message) ([]*message.Message, error) {
		if runs.Add(1) == 1 {
			close(entered)
			<-leave
			panic("handler failed")
		}
		return nil, nil
	})
	deliver := func() {
		defer func() { _ = recover() }()
		msg := message.NewMessage(key.MessageID, nil)
		msg.SetContext(k.context())
		_, _ = handle(msg)
	}
	first := make(chan struct{})
	go func() { defer close(first); deliver() }()
	<-entered
	const wait = 50 * time.Millisecond
	time.AfterFunc(wait, func() { close(leave) })
	deliver() // waits for the first
	<-first
	outcomes := map[inbox.Outcome]inbox.Observation{}
	for _, o := range watched.all() {
		outcomes[o.Outcome] = o
	}
	if len(outcomes) != 2 || outcomes[inbox.Failed].Duration < wait || outcomes[inbox.Processed].Wait < wait/2 {
		k.Errorf("observed %+v", watched.all())
	}
}

func oldAfter(retention, age time.Duration) inbox.TooOldOptions {
	return inbox.TooOldOptions{Retention: inbox.Retention{Default: retention}, Time: func(*message.Message) (time.Time, bool) {
		return time.Now().Add(-age), true
	}}
}

func withConsumer(guard inbox.TooOldOptions, retention time.Duration) inbox.TooOldOptions {
	guard.Retention.Consumers = map[string]time.Duration{consumer: retention}
	return guard
}
