package inboxtest

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	inbox "github.com/devmappa/watermill-inbox"
)

// The relay publishes what is committed and unsent, whoever still delivers the input.
var relayCases = []kitCase{
	{"what is unsent is published under its UUIDs, and once", relayPublishesUnsent},
	{"messages that are young are left to the router", relayLeavesYoung},
	{"a consumer that is not named is never touched", relayLeavesOthers},
	{"many relays publish each record once", manyRelays},
	{"a relay that dies holds its messages up until its lease ends", leaseEnds},
	{"a publisher that fails or hangs holds up only its own consumer", relayConsumersAreApart},
	{"unreadable messages are skipped, and old ones given up", relaySkips},
	{"Run ends with its context, though a publisher hangs", relayRunEnds},
	{"options that cannot be used are refused", relayOptionsAreRefused},
	{"messages that somebody else is publishing are leased once, in pages", leasedOnceInPages},
}

func (k *kit) relayRepository() inbox.RelayRepository {
	k.Helper()
	k.records()
	return k.Repository.(inbox.RelayRepository)
}

// storeUnsent processes a message whose handler returned one, which is not published, and makes it older.
func (k *kit) storeUnsent(key inbox.Key, age time.Duration) {
	k.Helper()
	transaction := k.claim(k.context(), key)
	stored := append([]byte("\x01"), byte(len(key.MessageID)+3))
	stored = append(append(append(stored, byte(len(key.MessageID))), key.MessageID...), 0, 0)
	if _, err := transaction.Store(k.context(), inbox.StoreParams{Topic: publishTopic, Produced: stored}); err != nil {
		k.Fatal(err)
	}
	if err := transaction.Commit(k.context()); err != nil {
		k.Fatal(err)
	}
	if err := k.Age(k.context(), key, age); err != nil {
		k.Fatal(err)
	}
}

// outlet is a publisher of a relay.
type outlet struct {
	mutex sync.Mutex
	ids   []string
	fails func(id string) error
}

func (o *outlet) Publish(topic string, messages ...*message.Message) error {
	for _, msg := range messages {
		if o.fails != nil {
			if err := o.fails(msg.UUID); err != nil {
				return err
			}
		}
		if topic != publishTopic || msg.Context().Err() != nil {
			return errors.New("a wrong topic, or a context that has ended")
		}
		o.mutex.Lock()
		o.ids = append(o.ids, msg.UUID)
		o.mutex.Unlock()
	}
	return nil
}

func (o *outlet) Close() error { return nil }

func (o *outlet) sorted() []string {
	o.mutex.Lock()
	defer o.mutex.Unlock()
	return slices.Sorted(slices.Values(o.ids))
}

// relay makes batches of two, so that a handful of records takes several.
func (k *kit) relay(options inbox.RelayOptions) *inbox.Relay {
	k.Helper()
	if options.BatchSize == 0 {
		options.BatchSize = 2
	}
	relay, err := inbox.NewRelay(k.relayRepository(), options)
	if err != nil {
		k.Fatal(err)
	}
	return relay
}

func to(publisher message.Publisher) map[string]message.Publisher {
	return map[string]message.Publisher{consumer: publisher}
}

func (k *kit) unsentKeys(n int) (keys []inbox.Key, ids []string) {
	k.Helper()
	for range n {
		key := k.kitKey()
		k.storeUnsent(key, time.Hour)
		keys, ids = append(keys, key), append(ids, key.MessageID)
	}
	slices.Sort(ids)
	return keys, ids
}

func relayPublishesUnsent(k *kit) {
	keys, ids := k.unsentKeys(5)
	var (
		out  outlet
		seen []inbox.RelayObservation
	)
	relay := k.relay(inbox.RelayOptions{Publishers: to(&out), Observe: func(_ context.Context, o inbox.RelayObservation) { seen = append(seen, o) }})
	for _, want := range []int{5, 0} {
		if pass, err := relay.Pass(k.context(), consumer); err != nil || pass != (inbox.RelayPass{Published: want}) {
			k.Fatalf("pass %+v, %v, want %d published", pass, err, want)
		}
	}
	if !slices.Equal(out.sorted(), ids) {
		k.Fatalf("published %q, want %q", out.ids, ids)
	}
	for _, key := range keys {
		k.wantUnsent(key, false)
	}
	if len(seen) != 2 || seen[0].Published != 5 || seen[0].Consumer != consumer || seen[0].Err != nil {
		k.Fatalf("observed %+v", seen)
	}
}

func relayLeavesYoung(k *kit) {
	key := k.kitKey()
	k.storeUnsent(key, 4*time.Minute)
	var out outlet
	if pass, err := k.relay(inbox.RelayOptions{Publishers: to(&out)}).Pass(k.context(), consumer); err != nil || pass.Published != 0 || len(out.ids) != 0 {
		k.Fatalf("pass %+v, %v", pass, err)
	}
	if pass, err := k.relay(inbox.RelayOptions{Publishers: to(&out), Age: time.Minute}).Pass(k.context(), consumer); err != nil || pass.Published != 1 {
		k.Fatalf("pass %+v, %v", pass, err)
	}
}

func relayLeavesOthers(k *kit) {
	own, others := k.kitKey(), k.key()
	others.Consumer = "another service's"
	k.storeUnsent(own, time.Hour)
	k.storeUnsent(others, time.Hour)
	var out outlet
	relay := k.relay(inbox.RelayOptions{Publishers: to(&out)})
	if pass, err := relay.Pass(k.context(), consumer); err != nil || pass.Published != 1 {
		k.Fatalf("pass %+v, %v", pass, err)
	}
	if _, err := relay.Pass(k.context(), others.Consumer); err == nil {
		k.Fatal("a pass over a consumer without a publisher")
	}
	k.wantUnsent(others, true)
}

func manyRelays(k *kit) {
	_, ids := k.unsentKeys(20)
	var (
		out       outlet
		published atomic.Int32
		group     sync.WaitGroup
	)
	for range 4 {
		group.Add(1)
		go func() {
			defer group.Done()
			for range 3 { // a batch that is leased by another is passed over
				pass, err := k.relay(inbox.RelayOptions{Publishers: to(&out), BatchSize: 3}).Pass(k.context(), consumer)
				if err != nil {
					k.Errorf("a pass alongside others: %v", err)
				}
				published.Add(int32(pass.Published))
			}
		}()
	}
	group.Wait()
	if got := out.sorted(); !slices.Equal(got, ids) || published.Load() != 20 {
		k.Fatalf("published %q, %d in all, want %q", got, published.Load(), ids)
	}
}

func leaseEnds(k *kit) {
	key := k.kitKey()
	k.storeUnsent(key, time.Hour)
	selection := inbox.Selection{Consumer: consumer, Unsent: true}
	leased, err := k.records().LeaseUnsent(k.context(), selection, inbox.Record{}, 10, 500*time.Millisecond)
	if err != nil || len(leased) != 1 || leased[0].Key != key || leased[0].Topic != publishTopic || len(leased[0].Produced) == 0 {
		k.Fatalf("leased %+v, %v", leased, err)
	}
	var out outlet
	relay := k.relay(inbox.RelayOptions{Publishers: to(&out)})
	if pass, err := relay.Pass(k.context(), consumer); err != nil || pass.Published != 0 {
		k.Fatalf("during the lease: %+v, %v", pass, err)
	}
	for pass := (inbox.RelayPass{}); pass.Published == 0; { // no signal tells the end of a lease
		if pass, err = relay.Pass(k.context(), consumer); err != nil {
			k.Fatal(err)
		}
	}
	k.wantUnsent(key, false)
}

func relayConsumersAreApart(k *kit) {
	bad, good := k.kitKey(), k.kitKey()
	bad.Consumer, good.Consumer = "bad", "good"
	k.storeUnsent(bad, time.Hour)
	k.storeUnsent(good, time.Hour)
	hangs := make(chan struct{})
	hung := sync.OnceFunc(func() { close(hangs) })
	leave := make(chan struct{})
	away := &outlet{fails: func(string) error { hung(); <-leave; return errors.New("away") }}
	out := &outlet{}
	relay := k.relay(inbox.RelayOptions{Publishers: map[string]message.Publisher{"bad": away, "good": out}, Interval: time.Millisecond, Lease: time.Millisecond})
	ctx, cancel := context.WithCancel(k.context())
	stopped := make(chan error, 1)
	go func() { stopped <- relay.Run(ctx) }()
	<-hangs
	for k.wantProcessed(good).Produced != nil && ctx.Err() == nil {
		time.Sleep(time.Millisecond) // no signal tells that it is marked
	}
	k.wantUnsent(bad, true)
	close(leave)
	cancel()
	if err := <-stopped; !errors.Is(err, context.Canceled) {
		k.Fatalf("Run returned %v", err)
	}
}

func relaySkips(k *kit) {
	newer, old, good := k.kitKey(), k.kitKey(), k.kitKey()
	transaction := k.claim(k.context(), newer)
	if _, err := transaction.Store(k.context(), inbox.StoreParams{Topic: publishTopic, Produced: []byte("\x02frames")}); err != nil {
		k.Fatal(err)
	}
	if err := transaction.Commit(k.context()); err != nil {
		k.Fatal(err)
	}
	if err := k.Age(k.context(), newer, time.Hour); err != nil {
		k.Fatal(err)
	}
	k.storeUnsent(old, 48*time.Hour)
	k.storeUnsent(good, time.Hour)
	var out outlet
	logger := newCapture()
	relay := k.relay(inbox.RelayOptions{Publishers: to(&out), GiveUp: 24 * time.Hour, Logger: logger})
	pass, err := relay.Pass(k.context(), consumer)
	if err != nil || pass != (inbox.RelayPass{Published: 1, Unreadable: 1, GivenUp: 1}) || !slices.Equal(out.ids, []string{good.MessageID}) {
		k.Fatalf("pass %+v, %v, published %q", pass, err, out.ids)
	}
	k.wantUnsent(newer, true)
	k.wantUnsent(old, true)
	if got := logger.errors(); len(got) != 1 {
		k.Fatalf("error lines %q", got)
	}
}

func relayRunEnds(k *kit) {
	k.storeUnsent(k.kitKey(), time.Hour)
	hangs, leave := make(chan struct{}), make(chan struct{})
	hung := sync.OnceFunc(func() { close(hangs) })
	relay := k.relay(inbox.RelayOptions{Publishers: to(&outlet{fails: func(string) error { hung(); <-leave; return nil }})})
	ctx, cancel := context.WithCancel(k.context())
	stopped := make(chan error, 1)
	go func() { stopped <- relay.Run(ctx) }()
	<-hangs
	cancel()
	select {
	case err := <-stopped:
		if !errors.Is(err, context.Canceled) || err == context.Canceled {
			k.Errorf("Run returned %v, want it to say that a publisher hangs", err)
		}
	case <-time.After(patience):
		k.Error("Run does not end")
	}
	close(leave)
}

func relayOptionsAreRefused(k *kit) {
	var out outlet
	for name, options := range map[string]inbox.RelayOptions{
		"no publishers":            {},
		"a nil publisher":          {Publishers: to(nil)},
		"an invalid consumer":      {Publishers: map[string]message.Publisher{"": &out}},
		"a negative age":           {Publishers: to(&out), Age: -1},
		"a negative lease":         {Publishers: to(&out), Lease: -1},
		"a negative interval":      {Publishers: to(&out), Interval: -1},
		"a negative batch":         {Publishers: to(&out), BatchSize: -1},
		"giving up before the age": {Publishers: to(&out), Age: time.Hour, GiveUp: time.Hour},
		"a negative giving up":     {Publishers: to(&out), GiveUp: -1},
	} {
		if _, err := inbox.NewRelay(k.relayRepository(), options); err == nil {
			k.Errorf("%s was taken", name)
		}
	}
	if _, err := inbox.NewRelay(nil, inbox.RelayOptions{Publishers: to(&out)}); err == nil {
		k.Error("no repository was taken")
	}
}

func leasedOnceInPages(k *kit) {
	keys, _ := k.unsentKeys(5)
	slices.SortFunc(keys, inbox.Key.Compare)
	selection := inbox.Selection{Consumer: consumer, Unsent: true, OlderThan: time.Minute}
	var got []inbox.Key
	for after := (inbox.Record{}); ; {
		page, err := k.records().LeaseUnsent(k.context(), selection, after, 2, time.Hour)
		if err != nil {
			k.Fatal(err)
		}
		for _, record := range page {
			got = append(got, record.Key)
		}
		if len(page) < 2 {
			break
		}
		after = page[1]
	}
	if !slices.Equal(got, keys) {
		k.Fatalf("leased %v, want %v", got, keys)
	}
	if again, err := k.records().LeaseUnsent(k.context(), selection, inbox.Record{}, 10, time.Hour); err != nil || len(again) != 0 {
		k.Fatalf("leased again: %v, %v", again, err)
	}
	// A lease hides nothing from the others.
	if count, err := k.records().CountRecords(k.context(), selection); err != nil || count != 5 {
		k.Fatalf("%d are unsent, %v", count, err)
	}
	k.markSent(*k.wantProcessed(keys[0]))
	k.wantUnsent(keys[0], false)
}
